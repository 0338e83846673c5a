"""Which commands' workers may be forked, and how the others' reason reads."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.forking.python_command import (
    PRELOAD,
    PRELOADED,
    PRELOADED_FOR_LOCKSTEP,
    NotForkedError,
    PythonCommand,
    check_program,
    python_command,
)
from lockstep.launch.plan.job_plan import describe_plan, plan_local

PYTHON = sys.executable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked only on Linux")


def program(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def reason(*command: str, **environment: str) -> str:
    with pytest.raises(NotForkedError) as error:
        python_command(command, environment)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "flags", "words"),
    [
        (["train.py", "--lr", "1"], [], ["train.py", "--lr", "1"]),
        (["-m", "package.train", "-u"], [], ["-m", "package.train", "-u"]),
        (["-mpackage.train", "-u"], [], ["-m", "package.train", "-u"]),
        (["-c", "print()", "-m"], [], ["-c", "print()", "-m"]),
        (["-cprint()"], [], ["-c", "print()"]),
        (["-u", "train.py", "-u"], ["-u"], ["train.py", "-u"]),
        (["-B", "-O", "-OO", "-m", "train"], ["-B", "-O", "-OO"], ["-m", "train"]),
        (["-W", "error", "train.py"], ["-W", "error"], ["train.py"]),
        (["-Werror", "-u", "train.py"], ["-Werror", "-u"], ["train.py"]),
        (["."], [], ["."]),
    ],
)
def test_interpreters_flags_are_split_from_the_program(given: list[str], flags: list[str], words: list[str]) -> None:
    assert python_command([PYTHON, *given], {}) == PythonCommand(PYTHON, tuple(flags), tuple(words), PRELOADED)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["train.py", "--lr", "1"], ("train.py", "--lr", "1")),
        (["-m", "train", "-c", "x"], ("train", "-c", "x")),
        (["-c", "print()", "-m"], ("-c", "-m")),
    ],
)
def test_module_imported_beforehand_sees_the_programs_arguments(words: list[str], arguments: tuple[str, ...]) -> None:
    assert python_command([PYTHON, *words], {}).arguments == arguments


def test_the_interpreter_is_found_as_the_workers_path_has_it() -> None:
    found = python_command(["python", "train.py"], {"PATH": str(Path(PYTHON).parent)})
    assert found.interpreter == str(Path(PYTHON).with_name("python"))


@pytest.mark.parametrize(
    "first_lines",
    [
        f"#!{PYTHON}\n# -*- coding: utf-8 -*-\n",
        f"#!{PYTHON}\n",
        f"#!/bin/sh\n'''exec' {PYTHON} \"$0\" \"$@\"\n' '''\n",
        f"#!/bin/sh\n'''exec' \"{PYTHON}\" \"$0\" \"$@\"\n' '''\n",
        f"#!/bin/sh\n'''exec' '{PYTHON}' \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_installed_script_runs_in_the_interpreter_that_it_names(tmp_path: Path, first_lines: str) -> None:
    script = program(tmp_path / "tool", f"{first_lines}import sys\n")
    expected = PythonCommand(PYTHON, (), (script, "-u"), PRELOADED)
    assert python_command([script, "-u"], {}) == expected
    assert python_command(["tool", "-u"], {"PATH": str(tmp_path)}) == expected


def test_lockstep_itself_has_more_to_load() -> None:
    assert python_command([PYTHON, "-m", "lockstep", "train"], {}).modules == PRELOADED_FOR_LOCKSTEP
    assert python_command([PYTHON, "-u", "-m", "lockstep", "train"], {}).modules == PRELOADED_FOR_LOCKSTEP
    ours = str(Path(PYTHON).with_name("lockstep"))
    assert python_command([PYTHON, ours, "train"], {}).modules == PRELOADED_FOR_LOCKSTEP
    assert python_command([PYTHON, "-m", "lockstep.launch.hosts_doctor"], {}).modules == PRELOADED
    assert python_command([PYTHON, "lockstep"], {}).modules == PRELOADED


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import lockstep\nworld = lockstep.connect()\n", ["lockstep.run.connect"]),
        ("from lockstep import survive, connect\n", ["lockstep.run.connect"]),
        ("import horovod.torch as hvd\n", ["lockstep.hvd"]),
        ("def main():\n    from horovod import torch as hvd\n", ["lockstep.hvd"]),
        ("step = torch.compile(step)\n", ["lockstep.models.compiler"]),
        ("import re\nmodel.compile()\n", ["lockstep.models.compiler"]),
        ("from torch import compile, nn\n", ["lockstep.models.compiler"]),
        ("import re\nre.compile('x')\nfrom torch import nn\n", []),
        ("import lockstep\nlockstep.step(3)\nconnect()\nimport horovodx\n", []),
    ],
)
def test_script_tells_what_else_it_will_import(tmp_path: Path, text: str, modules: list[str]) -> None:
    script = program(tmp_path / "train.py", text)
    assert python_command([PYTHON, script], {}).modules == (*PRELOADED, *modules)
    assert python_command([PYTHON, "-c", text], {}).modules == (*PRELOADED, *modules)


@pytest.mark.parametrize(
    "content",
    [
        f"#!/usr/bin/env {PYTHON}\n".encode(),
        f"#!{PYTHON} -I\n".encode(),
        b"#!/bin/sh\nexec python train.py\n",
        b"echo",
        b"",
        b"\x7fELF\xff\xfe",
    ],
)
def test_other_programs_start_by_themselves(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "tool"
    script.write_bytes(content)
    script.chmod(0o755)
    assert reason(str(script)) == f"{script} is not run by {PYTHON}"


def test_other_interpreter_differs_even_if_both_are_one_file(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(PYTHON)
    assert "is not run by" in reason(str(other), "train.py")
    assert "is not run by" in reason(program(tmp_path / "tool", f"#!{other}\n"))
    assert "is not run by" in reason("/bin/sh", "-c", f"{PYTHON} train.py")
    assert "is not run by" in reason(str(tmp_path / "missing"))
    assert "is not run by" in reason(program(tmp_path / "broken", f"#!{tmp_path / 'missing'}\n"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-i", "train.py"], "the interpreter's flag -i"),
        (["-u", "-X", "dev", "train.py"], "the interpreter's flag -X"),
        (["-I", "-m", "train"], "the interpreter's flag -I"),
        (["-uB", "train.py"], "the interpreter's flag -uB"),
        (["-"], "the program comes from stdin"),
        ([], "there is no program"),
        (["-u"], "there is no program"),
        (["-W"], "there is no program"),
        (["-m"], "there is no program"),
        (["-u", "-c"], "there is no program"),
        (["train.pyc"], "the program is compiled"),
    ],
)
def test_what_a_fork_cannot_have_is_named(words: list[str], why: str) -> None:
    assert reason(PYTHON, *words) == why


@pytest.mark.parametrize(
    ("name", "values", "why", "harmless"),
    [
        *(
            (name, ["1"], "{} is set", "")
            for name in ("PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONNEWINTHEFUTURE")
        ),
        *((name, ["close"], "{} is set", "FALSE") for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")),
        ("KMP_AFFINITY", ["close"], "{} is set", "FALSE"),
        (PRELOAD, ["0", "false", "No", "off"], "{}={}", "1"),
        # The preloaded process has them, too
        *((name, [], "", "1") for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS")),
    ],
)
def test_variable_that_forbids_a_fork_is_named(name: str, values: list[str], why: str, harmless: str) -> None:
    for value in values:
        assert reason(PYTHON, "train.py", **{name: value}).startswith(why.format(name, value))
    assert python_command([PYTHON, "train.py"], {name: harmless})


def test_elsewhere_than_on_linux_workers_start_by_themselves() -> None:
    with pytest.raises(NotForkedError, match=r"^workers are forked only on Linux$"):
        python_command([PYTHON, "train.py"], {}, "darwin")


def test_one_preloaded_process_serves_all_that_start_like_it() -> None:
    def command(*words: str) -> PythonCommand:
        return python_command([PYTHON, *words], {})

    first = command("-u", "train.py", "--lr", "1")
    assert first.starts_like(command("-u", "-m", "other"))
    assert not first.starts_like(command("train.py", "--lr", "1"))
    assert not first.starts_like(command("-u", "-m", "lockstep", "train"))


def test_dry_run_shows_how_workers_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTHON") or name == PRELOAD]:
        monkeypatch.delenv(name)
    forked, alone = (
        describe_plan(plan_local(2, [*command], 2, {})) for command in ([PYTHON, "train.py"], ["sh", "a.sh"])
    )
    modules = re.escape(", ".join(PRELOADED))
    assert re.search(f"^# a host's workers are forked from one process .* {modules}$", forked, re.MULTILINE)
    assert f"\n# each worker starts its own interpreter: sh is not run by {PYTHON}\n" in f"\n{alone}\n"
    plan = plan_local(2, [PYTHON, "train.py"], 2, {PRELOAD: "0"})
    assert "# each worker starts its own interpreter: LOCKSTEP_PRELOAD=0" in describe_plan(plan).splitlines()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nosuch"], "nosuch: command not found; to run a script, put `python` before it"),
        (
            [PYTHON, "-u", "nosuch.py"],
            "nosuch.py: no such file in {folder}; give the path of a script that this user may read",
        ),
        (
            [PYTHON, "unreadable.py"],
            "unreadable.py: no permission to read it; give the path of a script that this user may read",
        ),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(
    words: list[str], problem: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "unreadable.py").touch()
    monkeypatch.setattr(
        os, "access", lambda path, mode, real=os.access: path != "unreadable.py" and real(path, mode)
    )  # root may read any file
    with pytest.raises(ConfigError, match=f"^{re.escape(problem.format(folder=here))}$"):
        check_program(words)


@pytest.mark.parametrize(
    "words",
    [
        *(["sh", "nosuch.sh"], [PYTHON], [PYTHON, "-m", "nosuch"], [PYTHON, "-c", "pass"], [PYTHON, "-"]),
        *(
            [PYTHON, "-X", "dev", "nosuch.py"],
            [PYTHON, "train.py", "nosuch.py"],
            [PYTHON, "package"],
            [PYTHON, "z.pyz"],
            ["./python-of-conda", "environment", "train.py"],
        ),
    ],
)
def test_other_commands_are_left_to_the_workers(words: list[str], here: Path) -> None:
    for name in ("train.py", "z.pyz", "package/__main__.py"):
        program(here / name, "")
    (here / "python-of-conda").touch(mode=0o755)
    check_program(words)
