"""Removed flags, commands and names raise one message that names the replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.parse import parse_train
from lockstep.config import recipes
from lockstep.errors import ConfigError
from lockstep.train.fit import configure
from lockstep.train.history import EpochRecords

REWIND = (
    "--on-nan rewind: must be stop or skip; instead of rewind, continue from the newest checkpoint with --resume auto"
)


@pytest.mark.parametrize(
    "arguments", [["--on-nan", "rewind"], ["--on_nan=rewind"], ["--on-nan", "skip", "--on-nan=rewind"]]
)
def test_a_removed_value_names_its_replacement(arguments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_train(["digits", *arguments])
    assert str(caught.value) == REWIND


def test_a_removed_value_is_refused_in_a_recipe_and_in_fit(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("numerics: {on_nan: rewind}")
    with pytest.raises(ConfigError, match=r"numerics\.on_nan is 'rewind', but must be 'stop' or 'skip'"):
        recipes.load(str(recipe))
    with pytest.raises(ConfigError) as caught:
        configure(on_nan="rewind")
    assert str(caught.value) == REWIND


@pytest.mark.parametrize("name", ["loaders", "TrainBatches", "EvalBatches"])
def test_removed_loaders_name_the_loader_of_connect(name: str) -> None:
    with pytest.raises(ImportError, match=rf"loaders\.{name} was removed; use lockstep\.connect\(\)"):
        exec(f"from lockstep.data.loaders import {name}")


def test_plot_of_a_history_names_arrays_and_the_report() -> None:
    with pytest.raises(
        ConfigError, match=r"History\.plot was removed; plot the arrays in train and val.* or run `lockstep report"
    ):
        EpochRecords().history().plot("f1")


def test_data_info_names_data_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "lockstep data: error: info: removed; `lockstep data verify PATH` describes a data set, then checks it\n"
    )


@pytest.mark.parametrize("flags", ["digits", "digits --repeats=3", "-a digits-net -j 0", "--data-dir x"])
def test_loading_study_takes_the_flags_of_training(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "loading", *flags.split()]) == 2
    assert capsys.readouterr().err == (
        "lockstep study: error: put the job's `lockstep train` flags after --: lockstep study loading -- digits -b 64\n"
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train digits --progressive-sizes 0:8 2:16", "train: error: --progressive-sizes: removed; train with a small"),
        (
            "data prepare imagenet a b c d --md5",
            "data: error: --md5: removed; compare the archives' checksums with md5sum",
        ),
        (
            "script lsf --output job.sh -- true",
            "script: error: --output: removed; write the script to a file with > FILE",
        ),
        ("script lsf --force -- true", "script: error: --force: removed; write the script to a file with > FILE"),
        ("data pack a b --format webp", "data: error: --format: removed; images larger than --short-side become JPEG"),
        ("data pack a b --quality=80", "data: error: --quality: removed; images larger than --short-side become JPEG"),
        *(
            (f"jobs{flags}", "jobs: error: this command was removed; use the scheduler's own commands: squeue --me, ")
            for flags in ("", " --cancel 17 18", " --help")
        ),
        ("submit pbs --dry-run -- true", "submit: error: --dry-run: removed; `lockstep script` prints the script"),
    ],
)
def test_a_removed_flag_names_its_replacement(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"lockstep {message}")
