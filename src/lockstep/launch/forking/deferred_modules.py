"""Keep preloaded modules out of `sys.modules` until the script imports them.

A worker that is forked from a preloaded process has torch in memory before its script runs. To the script, `import
torch` must still look like the first import: it reads the environment at that moment, and a module of the same name in
the script's folder takes precedence. A finder at the front of `sys.meta_path` returns the deferred modules
without executing them again.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Two copies of their C libraries cannot be in one process.
ONE_COPY = frozenset({"torch", "torchvision", "numpy"})

AfterPutBack = Callable[[Collection[str]], None]


def defer(modules: Mapping[str, ModuleType], all_with: Collection[str], after: AfterPutBack) -> None:
    """Remove modules from `sys.modules` until they are imported.

    Args:
        modules: By full name. A submodule is deferred only together with its top-level package.
        all_with: Top-level names. Importing one of these restores every deferred module; importing another
            restores only that package.
        after: Called with the top-level names that were put back.
    """
    packages: dict[str, dict[str, ModuleType]] = {}
    for name, module in modules.items():
        top = name.partition(".")[0]
        if top in modules:
            packages.setdefault(top, {})[name] = module
    for package in packages.values():
        for name in package:
            sys.modules.pop(name, None)
    if packages:
        sys.meta_path.insert(0, DeferredFinder(packages, all_with, after))


class DeferredFinder(importlib.abc.MetaPathFinder):
    """Find the deferred top-level modules if the other finders still find the same files."""

    def __init__(
        self, packages: dict[str, dict[str, ModuleType]], all_with: Collection[str], after: AfterPutBack
    ) -> None:
        self._packages = packages
        self._all_with = all_with
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = self._packages.get(fullname)
        if package is None:
            return None
        module = package[fullname]
        own: ModuleSpec | None = getattr(module, "__spec__", None)
        if own is None or not _locations(own):  # created at run time, unknown to all finders
            return ModuleSpec(fullname, DeferredLoader(module, own, self), origin=None if own is None else own.origin)
        found = self._other_spec(fullname)
        if found is None:
            return None
        if _same_place(own, found):
            found.loader = DeferredLoader(module, own, self, found)
            return found
        if fullname in ONE_COPY:
            raise ImportError(
                f"{fullname} would be loaded from {_locations(found)[0]}, but the launcher preloaded "
                f"{_locations(own)[0]}; use --no-preload",
                name=fullname,
            )
        return None

    def put_back(self, name: str) -> None:
        """Put the modules of a package, or all modules, back into `sys.modules`."""
        names = list(self._packages) if name in self._all_with else [name]
        back = [top for top in names if top == name or self._is_served(top)]
        for top in back:
            for full, module in self._packages.pop(top, {}).items():
                sys.modules.setdefault(full, module)
        if not self._packages and self in sys.meta_path:
            sys.meta_path.remove(self)
        self._after(back)

    def _is_served(self, top: str) -> bool:
        if top in sys.modules:  # the script has replaced the module
            return False
        try:
            return self.find_spec(top) is not None
        except ImportError:
            return False

    def _other_spec(self, name: str) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, None)
                if spec is not None:
                    return spec
        return None


class DeferredLoader(importlib.abc.Loader):
    """Return a module that is already loaded. Other attributes are those of the module's original loader."""

    def __init__(
        self, module: ModuleType, spec: ModuleSpec | None, finder: DeferredFinder, found: ModuleSpec | None = None
    ) -> None:
        self._module = module
        self._spec = spec
        self._finder = finder
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system replaced
        self._finder.put_back(module.__name__)

    def get_code(self, name: str) -> Any:
        """Return the code of a module that `python -m` runs, and let its `__spec__` have its original loader."""
        loader: Any = self._spec and self._spec.loader
        if self._found:
            self._found.loader = loader
        return loader.get_code(name)

    def __getattr__(self, name: str) -> Any:
        loader = None if self._spec is None else self._spec.loader
        return getattr(loader, name)


def _locations(spec: ModuleSpec) -> list[str]:
    """Return the file of a module, or the folders of a namespace package."""
    if spec.has_location and spec.origin:
        return [spec.origin]
    return list(spec.submodule_search_locations or ())


def _same_place(one: ModuleSpec, other: ModuleSpec) -> bool:
    here, there = _locations(one), _locations(other)
    return any(_same_file(path, candidate) for path in here for candidate in there)


def _same_file(one: str, other: str) -> bool:
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False


def third_party(names: Iterable[str]) -> list[str]:
    """Return the names that are not in Python's standard library."""
    return [name for name in names if not _is_standard(name.partition(".")[0])]


def _is_standard(top: str) -> bool:
    return top in sys.stdlib_module_names or top.startswith("_sysconfigdata") or top in ("__main__", "__mp_main__")
