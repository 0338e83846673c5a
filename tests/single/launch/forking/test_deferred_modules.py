"""What a script notices of modules that were loaded before it started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Preloaded, comparable, preloaded, write_files

from lockstep.launch.forking.forked_worker import CONSTANT_SEED

pytestmark = pytest.mark.cold

LIBRARY = {
    "big/__init__.py": "import warnings, helper, spaced.part, big.part\nwarnings.filterwarnings('ignore', 'from big')\n"
    "class Thing: pass\n",
    "big/part.py": "",
    "big/later.py": "import helper\nvalue = 'later'",
    "helper.py": "import sys\nprint('helper runs', file=sys.stderr)\nvalue = 'of the library'\n"
    "if __name__ == '__main__': print(sys.argv[1:], __spec__)",
    "spaced/part.py": "value = 1",
    "optional.py": "1 / 0",
}
SCRIPTS = {
    "modules are absent before": "import sys\n"
    "print([n for n in sys.modules if n.startswith(('big', 'helper', 'lock'))])",
    "an import brings all": "import sys, big\n"
    "print(sorted(n for n in sys.modules if n.startswith(('big', 'helper', 'space'))))\n"
    "print(big, big.__spec__, big.__loader__, big.part, big.__path__, spaced if 'spaced' in globals() else None)",
    "a dependency comes alone": "import sys, helper\nprint('big' in sys.modules, helper.__spec__)\nimport big\n"
    "print(sys.modules['helper'] is helper, type(sys.meta_path[0]))",
    "a submodule first": "import big.part, sys\nprint(big.part, big.part.__spec__, type(sys.meta_path[0]))",
    "a submodule that was not loaded": "from big.later import value\nprint(value)",
    "a namespace package": "import spaced\nprint(spaced.__path__, spaced.__spec__.origin)\nimport spaced.part",
    "a spec before the import": "import sys\nfrom importlib.util import find_spec\nspec = find_spec('big')\n"
    "print(spec.origin, spec.submodule_search_locations, spec.cached, spec.has_location, 'big' in sys.modules)\n"
    "print(find_spec('helper').loader.get_source('helper'), find_spec('helper').loader.get_filename('helper'))",
    "reload": "import importlib, helper\nprint(importlib.reload(helper) is helper, helper.__spec__)",
    "a module without its path": "import sys\nsys.path[:] = [p for p in sys.path if 'library' not in p]\n"
    "try:\n    import helper\nexcept ModuleNotFoundError as error: print(error)\n",
    "a module that the script replaces": "import sys, types\nsys.modules['helper'] = types.ModuleType('mine')\n"
    "import big, helper\nprint(helper)",
    "a module that the script blocks": "import sys\nsys.modules['helper'] = None\n"
    "try:\n    import helper\nexcept ImportError as error: print(error)",
    "a removed module": "import sys, big\ndel sys.modules['helper']\nimport helper\nprint(helper.value)",
    "warnings before": "import warnings\nprint(warnings.filters)\nimport big\nprint(warnings.filters)",
    "warnings around": "import warnings\nwarnings.simplefilter('error')\nimport big\nwarnings.warn('from big')\n"
    "warnings.warn('from me')",
    "pickle": "import pickle, big\nprint(pickle.loads(pickle.dumps(big.Thing)) is big.Thing)",
    "threads": "import threading\ndef f():\n    import big, helper\n    print(big.Thing.__name__, helper.value)\n"
    "for t in (ts := [threading.Thread(target=f) for _ in range(4)]): t.start()\nfor t in ts: t.join()",
    "a failing import": "import optional",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    write_files(folder, LIBRARY)
    return folder


@pytest.fixture(scope="module")
def environment(library: Path) -> dict[str, str]:
    path = os.pathsep.join([str(library), *filter(None, sys.path)])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def worker(library: Path, environment: dict[str, str]) -> Iterator[Preloaded]:
    with preloaded(library, "big", "optional", environment=environment) as process:
        yield process


def same(worker: Preloaded, *command: str, folder: Path, environment: dict[str, str]) -> None:
    """Compare with a real interpreter, in which `helper` runs."""
    real = comparable(worker.run_really(*command, folder=folder, environment=environment))
    forked = comparable(worker.run(*command, folder=folder, environment=environment))
    assert (forked.code, forked.output) == (real.code, real.output)
    assert forked.errors.replace("helper runs\n", "") == real.errors.replace("helper runs\n", "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_what_it_sees_in_a_fresh_interpreter(
    name: str, worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    same(worker, "script.py", folder=tmp_path, environment=environment)


def test_a_held_module_is_not_executed_again(worker: Preloaded, environment: dict[str, str], tmp_path: Path) -> None:
    done = worker.run("-c", "import helper, big; print(helper.value)", folder=tmp_path, environment=environment)
    assert (done.code, done.output, done.errors) == (0, "of the library\n", "")


def test_a_held_module_can_be_the_command(worker: Preloaded, environment: dict[str, str], tmp_path: Path) -> None:
    same(worker, "-m", "helper", "a", folder=tmp_path, environment=environment)


def test_the_scripts_own_module_comes_first(worker: Preloaded, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 'mine'")
    (tmp_path / "script.py").write_text("import helper\nprint(helper.value, helper.__file__)\nimport big.later")
    same(worker, "script.py", folder=tmp_path, environment=environment)
    (tmp_path / "script.py").write_text("import big, helper\nprint(helper.value, helper.__file__)")
    same(worker, "script.py", folder=tmp_path, environment=environment)


def test_another_numpy_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    (tmp_path / "script.py").write_text("import numpy")
    with preloaded(tmp_path, "numpy", environment=environment) as process:
        done = process.run("script.py", folder=tmp_path, environment=environment)
    assert done.code == 1
    assert f"numpy would be loaded from {tmp_path / 'numpy.py'}, but the launcher preloaded" in done.errors
    assert done.errors.endswith("use --no-preload\n")


@pytest.fixture(scope="module")
def torch_worker(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Preloaded]:
    with preloaded(
        tmp_path_factory.mktemp("torch"), "torch", "numpy.random", "triton", environment=environment
    ) as process:
        yield process


def test_variables_set_before_import_take_effect_or_are_reported(
    torch_worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, logging, numpy, threadpoolctl\n"
        "def blas():\n"
        "    return [i['num_threads'] for i in threadpoolctl.threadpool_info() if i['internal_api'] == 'openblas']\n"
        "print('torch' in sys.modules, set(blas()) <= {1})\n"
        "os.environ.update(OMP_NUM_THREADS='3', TORCH_DISTRIBUTED_DEBUG='DETAIL', TORCHINDUCTOR_FREEZING='1')\n"
        "os.environ.update(TORCH_LOGS='fsdp', NCCL_DEBUG='INFO')\n"
        "import torch\n"
        "print(torch.get_num_threads(), torch.distributed.get_debug_level().name, set(blas()) <= {1})\n"
        "print(logging.getLogger('torch.distributed.fsdp').level)\n"
    )
    done = torch_worker.run("script.py", folder=tmp_path, environment=environment)
    assert (done.code, done.output) == (0, "False True\n3 DETAIL True\n20\n")
    assert done.errors == (
        "lockstep: TORCHINDUCTOR_FREEZING was set after torch was loaded and has no effect; "
        "set it before the launcher starts, or use --no-preload\n"
    )


def test_blas_threads_set_before_numpy_take_effect(
    torch_worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nos.environ['OPENBLAS_NUM_THREADS'] = '2'\nimport numpy, threadpoolctl\n"
        "print({i['num_threads'] for i in threadpoolctl.threadpool_info() if i['internal_api'] == 'openblas'} <= {2})"
    )
    done = torch_worker.run("script.py", folder=tmp_path, environment=environment)
    assert (done.code, done.output, done.errors) == (0, "True\n", "")


def test_random_states_are_as_after_a_fresh_import(
    torch_worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    code = "import numpy, torch; print(numpy.random.rand(), torch.initial_seed())"
    forked = [torch_worker.run("-c", code, folder=tmp_path, environment=environment) for _ in range(2)]
    assert {done.errors for done in forked} == {""}
    numbers, seeds = zip(*(done.output.split() for done in forked), strict=True)
    assert numbers[0] != numbers[1]
    assert (seeds[0] == seeds[1]) == (seeds[0] == str(CONSTANT_SEED))


def test_a_worker_that_never_imports_torch_exits_silently(
    torch_worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    done = torch_worker.run("-c", "print(1)", folder=tmp_path, environment=environment)
    assert (done.code, done.output, done.errors) == (0, "1\n", "")


def test_loaders_and_pickles_of_torch_work(
    torch_worker: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import cloudpickle, io, pickle, torch\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        "    for context in ('fork', 'spawn'):\n"
        "        loader = DataLoader(torch.arange(4), 2, num_workers=1, multiprocessing_context=context)\n"
        "        print([batch.tolist() for batch in loader])\n"
        "    torch.save({'a': torch.ones(1)}, file := io.BytesIO())\n"
        "    file.seek(0)\n"
        "    print(torch.load(file), pickle.loads(cloudpickle.dumps(lambda: torch.zeros(1)))())\n"
    )
    done = torch_worker.run("script.py", folder=tmp_path, environment=environment)
    batches = "[[0, 1], [2, 3]]\n"
    assert done.output == f"{batches}{batches}{{'a': tensor([1.])}} tensor([0.])\n", done.errors
    assert done.code == 0
