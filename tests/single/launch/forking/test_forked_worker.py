"""A forked worker's command sees and does what it sees and does in a fresh interpreter."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Preloaded, Result, comparable, preloaded, write_files

from lockstep.launch.forking import forked_worker

pytestmark = pytest.mark.cold

SHOW_MAIN = """
import sys, __main__
names = {name: repr(value) for name, value in vars(__main__).items()}
for name in sorted(names):
    print(name, names[name] if not name.startswith("names") else "")
print(sys.argv, sys.orig_argv, sys.path, sys.modules["__main__"] is __main__, __name__)
"""

SCRIPTS = {
    "attributes": SHOW_MAIN,
    "annotations": "x: int = 1\nimport __main__\nprint(__main__.__annotations__, __doc__)",
    "docstring": '"""Doc."""\nprint(__doc__)',
    "error": "def f():\n    raise ValueError('no')\nf()",
    "chained error": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e",
    "error group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "syntax error": "x = (\ny = 2\n",
    "encoding": "# coding: latin-1\nprint(ascii('\u00e4'))",
    "exit 3": "import sys; sys.exit(3)",
    "exit none": "import sys; sys.exit()",
    "exit text": "import sys; print('before'); sys.exit('reason')",
    "exit in function": "def f():\n    raise SystemExit(4)\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "real interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**9): pass",
    "hook": "import sys, traceback\ndef hook(kind, value, tb):\n    print(kind, value, sys.last_traceback is tb)\n"
    "    print(''.join(traceback.format_exception(kind, value, tb)))\nsys.excepthook = hook\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(7)\n1 / 0",
    "hook seen at exit": "import atexit, sys\n"
    "atexit.register(lambda: print(sys.excepthook is sys.__excepthook__))\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'at exit')\nprint('end')",
    "atexit after error": "import atexit\natexit.register(print, 'at exit')\n1 / 0",
    "file name at exit": "import atexit\natexit.register(lambda: print(sorted(globals())))",
    "file name at exit after error": "import atexit\natexit.register(lambda: print(sorted(globals())))\n1 / 0",
    "thread joined": "import threading, time\ndef f():\n    threading.main_thread().join()\n    print('joined')\n"
    "threading.Thread(target=f).start()",
    "daemon thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "threads": "import threading\n"
    "print(threading.main_thread() is threading.current_thread(), threading.active_count())",
    "unclosed file": "import os\nf = open('left.txt', 'w')\nf.write('kept')\n",
    "destructor": "import sys\nclass A:\n    def __del__(self): print('gone', sys is not None)\na = A()",
    "destructor in cycle": "class A:\n    def __del__(self): print('gone')\na = A()\na.me = a",
    "file of a preloaded module": "import fakelib\nfakelib.file = open('left.txt', 'w')\nfakelib.file.write('kept')\n",
    "output of C": "import ctypes\nctypes.CDLL(None).printf(b'no newline')",
    "unflushed output": "print('no newline', end='')",
    "collector": "import gc\nprint(gc.isenabled(), gc.get_threshold())",
    "warnings": "import sys, warnings\nprint(warnings.filters)\n"
    "warnings.warn('a'); warnings.warn('b', DeprecationWarning)",
    "flags": "import sys\nprint(sys.flags, sys.executable, sys.warnoptions)",
    "signals": "import signal\nprint([(s, signal.getsignal(s)) for s in sorted(signal.valid_signals())])",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through)",
    "input": "import sys\nprint(repr(input()), sys.stdin.read())",
    "environment": "import os, subprocess\nprint(sorted(os.environ.items()))\n"
    "print(*sorted(subprocess.check_output(['env'], text=True).splitlines()))\n"
    "print(os.getcwd())",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))",
    "fault handler": "import faulthandler, sys\nfaulthandler.enable()\nprint(faulthandler.is_enabled())",
    "temporary folder": "import tempfile\nprint(tempfile.gettempdir())",
    "time zone": "import time\nprint(time.tzname, time.timezone)",
    "multiprocessing": "import multiprocessing.process, sys, __main__\n"
    "print(sys.modules['__mp_main__'] is __main__, multiprocessing.process.ORIGINAL_DIR)",
    "modules": "import sys\nprint('fakelib' in sys.modules, 'forked' in sys.modules, 'lockstep' in sys.modules)",
    "spawn": "import multiprocessing, sys\ndef f(x):\n    return x, __name__\n"
    "if __name__ == '__main__':\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
    "        print(pool.map(f, [1, 2]))",
    "fork": "import multiprocessing\ndef f(x):\n    return x, __name__\n"
    "with multiprocessing.get_context('fork').Pool(1) as pool:\n    print(pool.map(f, [1, 2]))",
    "recursion": "import sys\nprint(sys.getrecursionlimit())\ndef f(): f()\ntry:\n    f()\n"
    "except RecursionError: print('deep')",
}
ENVIRONMENT = {"PATH": os.environ["PATH"], "ONLY": "this", "TMPDIR": "/", "TZ": "UTC-3", "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    folder = tmp_path_factory.mktemp("preloaded")
    (folder / "fakelib.py").write_text(
        "import tempfile, warnings\nwarnings.simplefilter('error', UserWarning)\ntempfile.gettempdir()\n"
    )
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Modules of the standard library that torch imports.
    standard = ("multiprocessing.reduction", "concurrent.futures", "cProfile", "asyncio", "unittest.mock")
    with preloaded(
        folder, "fakelib", *standard, environment=ENVIRONMENT | {"FAKE": "x", "TMPDIR": "/tmp", "TZ": "UTC-5"}
    ) as process:
        yield process


def same(worker: Preloaded, *command: str, folder: Path, **options: str) -> Result:
    """Run a command both ways; return the result, which is the same but for addresses and runpy's frames."""
    real = worker.run_really(*command, folder=folder, environment=ENVIRONMENT, **options)
    forked = worker.run(*command, folder=folder, environment=ENVIRONMENT, **options)
    assert comparable(forked) == comparable(real)
    return real


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_in_a_fresh_interpreter(name: str, worker: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    (tmp_path / "input.txt").write_text("one\ntwo\nthree")
    same(worker, "script.py", "--lr", "1 2", folder=tmp_path, given=str(tmp_path / "input.txt"))
    if name in ("unclosed file", "file of a preloaded module"):
        assert (tmp_path / "left.txt").read_text() == "kept"


MODULES = {
    "plain.py": SHOW_MAIN,
    "failing.py": "1 / 0",
    "pack/__init__.py": "import sys\nprint('argv in package', sys.argv)",
    "pack/__main__.py": SHOW_MAIN,
    "pack/part.py": "from . import other\n" + SHOW_MAIN,
    "pack/other.py": "",
    "pack/twice.py": "print(__name__)",
    "empty/__init__.py": "",
    "broken/__init__.py": "import not_there",
    "broken/part.py": "",
    "space/part.py": "print(__package__)",
    "profile.py": "print('own profile')",
    "main_folder/__main__.py": SHOW_MAIN + "import beside",
    "main_folder/beside.py": "print(__file__)",
    "shadow.py": "import profile\nprint(profile.__file__)",
}
COMMANDS = [
    ("-c", "import sys\nprint(__name__, sys.argv)" + SHOW_MAIN, "a", "b"),
    ("-c", "def f():\n    1 / 0\nf()"),
    ("-c", "x = ("),
    ("-m", "plain", "a"),
    ("-m", "failing"),
    ("-m", "pack", "a"),
    ("-m", "pack.part", "a"),
    ("-m", "space.part"),
    ("-m", "space"),
    ("-m", "empty"),
    ("-m", "absent"),
    ("-m", "absent.part"),
    ("-m", "pack.absent"),
    ("-m", "plain.py"),
    ("-m", "plain.part"),
    ("-m", "broken.part"),
    ("-m", ".plain"),
    ("-m", "sys"),
    ("-m", "fakelib"),
    ("-m", "json.tool", "--help"),
    ("-m", "cProfile", "-h"),
    ("-m", "pdb", "-c", "continue", "-c", "quit", "plain.py", "a"),
    ("-m", "trace", "--count", "--summary", "-C", "counts", "pack/other.py"),
    ("./plain.py",),
    ("pack/../plain.py",),
    ("link.py",),
    ("shadow.py",),
    ("main_folder",),
    ("./main_folder/", "a"),
    (".",),
    ("archive.zip", "a"),
    ("absent.py",),
    ("unreadable/x.py",),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_files(folder, MODULES)
    (folder / "links").mkdir()
    (folder / "link.py").symlink_to("pack/part.py")
    (folder / "pack" / "part.py").chmod(0o644)
    (folder / "unreadable").write_text("a file, not a folder")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW_MAIN)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_runs_as_in_a_fresh_interpreter(command: tuple[str, ...], worker: Preloaded, project: Path) -> None:
    same(worker, *command, folder=project)


def test_the_first_entry_of_the_path_is_absent_with_safe_path(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text("import sys\nprint(sys.path)\nimport beside")
    with preloaded(tmp_path, "json", flags=["-P", "-u"]) as process:
        for command in (
            ["script.py"],
            ["-c", "import sys; print(sys.path, sys.stdout.write_through, sys.stderr.line_buffering)"],
        ):
            real = process.run_really(*command, folder=tmp_path)
            assert process.run(*command, folder=tmp_path) == real


def test_output_to_a_terminal_is_buffered_by_line(worker: Preloaded, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        done = worker.run(
            "-c",
            f"import os, sys; os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR | os.O_NOCTTY), 1)\n"
            "import lockstep.launch.forking.forked_worker as f; f._restore_streams()\n"
            "print(sys.stdout.line_buffering, file=sys.stderr)",
            folder=tmp_path,
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert done == Result(0, "", "True\n")


def test_workers_draw_different_random_numbers(worker: Preloaded, tmp_path: Path) -> None:
    code = "import multiprocessing, random\nprint(random.random(), multiprocessing.current_process().authkey)"
    first, second = (worker.run("-c", code, folder=tmp_path) for _ in range(2))
    assert first.code == second.code == 0
    assert first.output.split()[0] != second.output.split()[0]
    assert first.output.split()[1:] != second.output.split()[1:]


def test_missing_first_module_is_an_error_and_others_are_not(tmp_path: Path) -> None:
    code = "\n".join(
        [
            "from lockstep.launch.forking.forked_worker import load",
            "print(load(['json', 'not_there']).packages)",
            "load(['absent'])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "['json', 'not_there']\n"
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'absent'\n")


def test_the_command_is_the_title_of_the_process(worker: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import psutil\nprint(psutil.Process().cmdline())")
    done = same(worker, "script.py", "--lr", "1", folder=tmp_path)
    assert done.output == f"{[sys.executable, 'script.py', '--lr', '1']}\n"


def test_process_whose_name_cannot_be_shown_goes_on() -> None:
    forked_worker.show_as(["\ud800"])  # has no bytes
