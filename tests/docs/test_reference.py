"""The pages of docs/reference say what the code says."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import reference_pages as tool
from pages import ROOT

from lockstep import errors, hvd, train
from lockstep.cli import main
from lockstep.launch.forking import late_environment, python_command
from lockstep.launch.node import parent_death
from lockstep.launch.plan import worker_variables
from lockstep.run.records import trackers
from lockstep.world import launcher_environment, rank0_address

REFERENCE = ROOT / "docs" / "reference"
LONG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


@pytest.mark.parametrize("name", tool.PAGES)
def test_committed_page_matches_the_source(name: str) -> None:
    committed = (REFERENCE / name).read_text(encoding="utf-8")
    assert committed == tool.PAGES[name]().rstrip() + "\n", "run: python tools/reference_pages.py"


@pytest.mark.parametrize("command", tool.all_commands())
def test_help_has_the_flags_of_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help-all"])
    shown = set(LONG.findall(capsys.readouterr().out))
    page = REFERENCE / "command-line" / f"{command.split()[0]}.md"
    shared = REFERENCE / "command-line" / "hosts-and-restarts.md"
    listed = set(LONG.findall("".join(path.read_text(encoding="utf-8") for path in (page, shared))))
    assert shown <= listed
    flags = tool.flags_of(tool.dataclass_of(command))
    assert {name for flag in flags for name in tool.names_of(flag) if LONG.fullmatch(name)} <= shown


# What looks like a variable's name in the source and is none.
NO_VARIABLES = {
    *("TCP_KEEPALIVE", "TCP_KEEPCNT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT"),  # of socket
    *("SC_CLK_TCK", "SC_PAGE_SIZE", "SC_PHYS_PAGES"),  # of os
    *("CYCLE_START", "ILSVRC2012_ID", "DATA_DIR"),  # the timeline's, ImageNet's, and a word of a message
    "ORIGINAL_DIR",  # multiprocessing's
    *("STRICT_SPREAD", "EXT_SUFFIX", "INVALID_PARAMETER_VALUE"),  # Ray's, sysconfig's and MLflow's
    *("SECRET_LENGTH", "DIGEST_LENGTH", "HOROVOD_SECRET_KEY"),  # constants of horovod.runner.common.util.secret
    *("CROSS_RANK", "LOCAL_SIZE"),  # the ends of names; the whole ones are those of `place`'s rows
    *("INJECTION64_PATH", "MODULE_DIR"),  # the ends of variables that load libraries
    "G_PER_KWH",  # a unit
    *("REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "NODE_FAIL", "BOOT_FAIL"),  # states of Slurm
    *("OUT_OF_MEMORY", "LAUNCH_FAILED"),  # states of Slurm
    *("ARRAY_INX", "JOB_NAME", "NO_REQUEUE", "OPEN_MODE", "GPUS_PER_NODE"),  # the ends of sbatch's variables
}
VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|^RANK$")


def _texts(path: Path) -> Iterator[str]:
    """A module's strings, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_every_environment_variable_of_the_source_is_on_the_page() -> None:
    page = (REFERENCE / "environment-variables.md").read_text(encoding="utf-8")
    tables = "".join((REFERENCE / name).read_text(encoding="utf-8") for name in ("launchers.md", "horovod.md"))
    listed = {*re.findall(r"`([A-Za-z0-9_]+)`", page), *VARIABLE.findall(tables)}
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    found = {name for path in paths for text in _texts(path) for name in VARIABLE.findall(text)}
    rows = (launcher_environment.TORCHRUN, *launcher_environment.OTHERS)
    found |= {name for row in rows for names in (*row.fields, row.marks) for name in names}
    found |= {rank0_address.OPEN_MPI_ADDRESS, *(name for names in rank0_address.LAUNCHES.values() for name in names)}
    found |= {*worker_variables.RANK_INFO, *worker_variables.OF_THE_HOST} - {"_"}
    assert not found - listed - NO_VARIABLES
    assert len(found) > 100


def test_every_variable_that_affects_starting_is_on_the_page() -> None:
    page = (REFERENCE / "environment-variables.md").read_text(encoding="utf-8")
    late = late_environment
    names = {*late.READ_AT_IMPORT, *late.READ_LATER, *late.ALLOCATOR, *late.LOGS, *late.THREADS, *late.BLAS_THREADS}
    names |= {late.DEBUG_LEVEL, python_command.PRELOAD, *python_command.PYTHON_VARIABLES, *python_command.PLACES}
    assert not names - set(re.findall(r"`([A-Z0-9_]+)`", page))


def test_every_exit_code_is_on_the_page_with_its_exception() -> None:
    page = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| (\d+) \| (.*)$", page[: page.index("## Jobs of several workers")]))
    kinds = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.LockstepError)
    ]
    for kind in kinds:
        if kind is not errors.LockstepError:
            assert f"`{kind.__name__}`" in rows[str(kind.exit_code)]
    assert {int(code) for code in rows} == {0, 127} | {kind.exit_code for kind in kinds}
    assert parent_death.NOT_FOUND == 127
    assert f"{errors.INTERRUPTED}: Ctrl-C" in page


def _keys(value: object) -> Iterator[str]:
    """The names of all fields in a record, but for packages' names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner) if key != "packages" else ()
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def _words(page: str) -> set[str]:
    return set(re.findall(r"`([\w.-]+)`", (REFERENCE / page).read_text(encoding="utf-8")))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that writes every kind of record but `stop`."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = "--epochs 1 --max-steps 3 --batch-size 16 --log-every 1 --desired-acc 0.001 --io-every 0.05 --ema-decay 0.9"
    flags += " --precision O1 --device cpu"
    assert main(["train", "digits", *flags.split(), "--run-dir", str(folder)]) == 0
    return folder


def _fields(source: Path) -> Iterator[str]:
    """The names in the dictionaries of a module, and in its calls that record something."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("record", "_record_epoch")):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def test_a_runs_records_have_the_fields_of_the_page(run: Path) -> None:
    words = _words("run-folder.md")
    records = [*_records(run / "metrics.jsonl"), *_records(run / "io" / "worker-0.jsonl")]
    assert {record["kind"] for record in records} == {"run", "step", "epoch", "energy", "desired", "io"}
    assert not {key for record in records for key in _keys(record)} - words
    assert not set(_keys(json.loads((run / "environment.json").read_text()))) - words
    written = {path.name for path in run.iterdir()} - {"logs", "io", "tensorboard", "checkpoints"}
    assert written <= words
    sources = [ROOT / f"src/lockstep/{name}.py" for name in ("train/run_records", "run/session")]
    rare = {field for source in sources for field in _fields(source)}
    assert {"skipped_steps", "sent_bytes", "reason"} <= rare
    assert not rare - words
    scalars = {tag for record in records if record["kind"] != "io" for tag in trackers.scalars(record)}
    tags = set(re.findall(r"`([\w/]+)`", (REFERENCE / "run-folder.md").read_text(encoding="utf-8")))
    assert not scalars - tags


def test_a_checkpoint_has_the_files_and_fields_of_the_page(run: Path) -> None:
    words = _words("run-folder.md")
    folder = run / "checkpoints" / "best"
    assert {path.name for path in folder.iterdir()} <= words
    state = json.loads((folder / "state.json").read_text())
    assert not state.keys() - words
    assert not {*_keys(state["progress"]), *_keys(state["about"]), *state["states"]} - words
    assert not {*state["states"]["precision"], *state["states"]["optimizer"]} - words
    text = (REFERENCE / "run-folder.md").read_text(encoding="utf-8")
    flags = {name for name in state["job"] if name.startswith("--")}
    assert all(f"`{flag}`" in text for flag in flags)
    assert not {*_keys(json.loads((folder / "manifest.json").read_text()))} - words - {*_names(folder)}


def _names(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


def test_studies_records_have_the_fields_of_the_page(tmp_path: Path) -> None:
    words = _words("run-folder.md")
    studies = ROOT / "examples" / "studies"
    loading = tmp_path / "loading.jsonl"
    flags = ["-j", "0", "--seconds", "0.01", "--out", str(loading)]
    assert main(["study", "loading", *flags, "--", "digits"]) == 0
    records = [record for path in (*studies.rglob("*.jsonl"), loading) for record in _records(path)]
    assert {record["kind"] for record in records} == {"scaling", "batch", "loading"}
    assert not {key for record in records for key in _keys(record)} - words


API = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REFERENCE / "api").glob("*.md")))
DOCUMENTED = re.findall(r"(?m)^::: ([\w.]+)$", API)
SUBMODULES = [(hvd, "elastic"), (hvd.elastic, "sampler"), (hvd.elastic, "state")]  # public, though not in `__all__`
PUBLIC = [*SUBMODULES, *((module, name) for module in (hvd, hvd.elastic, train) for name in module.__all__)]


def _object(path: str) -> object:
    """What a dotted path means, where a function may have its module's name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_the_api_pages_show_is_there_and_has_a_docstring(path: str) -> None:
    own = _object(path).__doc__
    assert own
    assert not own.startswith(f"{path.rpartition('.')[2]}(")  # what a dataclass without one gets


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_every_public_name_is_on_an_api_page(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    shown = any(_object(path) is thing for path in DOCUMENTED)
    assert shown or f"`{module.__name__.removeprefix('lockstep.')}.{name}`" in API
