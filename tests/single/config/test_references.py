"""MODULE:FUNCTION."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.references import resolve
from lockstep.errors import ConfigError

NewModule = Callable[[str, str], None]


@pytest.fixture
def new_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewModule:
    """Writes a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name: str, text: str) -> None:
        for part in (name.partition(".")[0], name):
            monkeypatch.delitem(sys.modules, part, raising=False)
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return write


def test_a_module_in_the_current_folder_is_found(new_module: NewModule) -> None:
    new_module("lockstep_test_nets", "def build(): return 'built'\nclass Net:\n    size = 3\n")
    new_module("lockstep_test_package.nets", "def build(): return 'nested'\n")
    assert resolve("--model", "lockstep_test_nets:build")() == "built"
    assert resolve("--model", "lockstep_test_nets:Net")().size == 3
    assert resolve("--model", "lockstep_test_package.nets:build")() == "nested"


def test_an_installed_module_is_found() -> None:
    assert resolve("--data", "json:dumps")([1]) == "[1]"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_module_here:build", "no module 'no_such_module_here'"),
        ("no_such_package.nets:build", "no module 'no_such_package'"),
        ("json.nothing:build", "no module 'json.nothing'"),
        ("json:nothing", "has no function 'nothing'"),
        ("json:__name__", "has no function '__name__'"),
        ("json:", "must be MODULE:FUNCTION"),
        ("time:nothing", "has no function 'nothing'"),  # a module without a file
        (":build", "must be MODULE:FUNCTION"),
    ],
)
def test_what_is_not_there_is_named_with_its_flag(reference: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("--model", reference)
    assert str(caught.value).startswith(f"--model {reference}")
    assert words in str(caught.value)


def test_what_the_users_module_lacks_itself_is_not_hidden(new_module: NewModule) -> None:
    """Its own missing import keeps its traceback, also where one name starts with the other."""
    new_module("lockstep_test_broken", "import lockstep_test\ndef build(): pass\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lockstep_test'"):
        resolve("--model", "lockstep_test_broken:build")
    new_module("lockstep_test_wrong", "raise RuntimeError('on purpose')\n")
    with pytest.raises(RuntimeError, match="on purpose"):
        resolve("--model", "lockstep_test_wrong:build")
