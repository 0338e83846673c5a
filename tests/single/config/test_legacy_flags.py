"""Older scripts' words: each spelling, and what is refused; tests/docs has the commands of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.cli.parse import TrainCommand, parse_train
from lockstep.config.flags import flags_of
from lockstep.config.legacy_flags import BARE, FIXED, REFUSED, RENAMED, translate
from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--b 64", "-b 64"),
        ("--b=64", "-b 64"),
        ("-b 64 --batch_size 32", "-b 64 --batch_size 32"),
        ("-r", "-r auto"),
        ("--resume", "--resume auto"),
        ("--resume -e", "--resume auto --evaluate"),
        ("--resume file.pth", "--resume file.pth"),
        ("--resume=file.pth", "--resume=file.pth"),
        ("--pretrained", "--pretrained default"),
        ("--pretrained weights.pth", "--pretrained weights.pth"),
        ("--channels-last True", "--channels-last"),
        ("--channels_last=False", "--no-channels-last"),
        ("--channels-last digits", "--channels-last digits"),
        ("--sync_bn", "--sync-bn"),
        ("--sync-bn yes --sync-bn 0", "--sync-bn --no-sync-bn"),
        ("-e true", "--evaluate"),
        ("--evaluate=off", "--no-evaluate"),
        ("--keep-batchnorm-fp32 true", "--keep-batchnorm-fp32=True"),
        ("--keep-batchnorm-fp32=False", "--keep-batchnorm-fp32=False"),
        ("--keep_batchnorm_fp32 None", "--keep-batchnorm-fp32=None"),
        ("--keep-batchnorm-fp32", "--keep-batchnorm-fp32=True"),
        ("--no-cuda", "--device cpu"),
        ("--dynamic-loss-scale", "--loss-scale dynamic"),
        ("--batches-per-allreduce=2", "--accumulate 2"),
        ("--seed 1 -- --gpu --b", "--seed 1 -- --gpu --b"),
        ("--batch 3", "--batch 3"),  # a prefix is no flag
    ],
)
def test_spellings(old: str, new: str) -> None:
    words = translate(old.split(), TrainCommand).arguments
    assert words == new.split()
    assert translate(words, TrainCommand).arguments == words


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_without_an_equal_are_refused_by_name(flag: str) -> None:
    for spelling in (flag, f"{flag}=1", flag[:2] + flag[2:].replace("-", "_")):
        with pytest.raises(ConfigError, match=re.escape(f"{flag} is an older script's flag: ")):
            translate([spelling, "1"], TrainCommand)


def test_wrong_values_of_booleans_are_refused() -> None:
    with pytest.raises(ConfigError, match="--sync-bn maybe: must be yes or no"):
        translate(["--sync-bn=maybe"], TrainCommand)
    with pytest.raises(ConfigError, match="--keep-batchnorm-fp32 maybe: must be True, False or None"):
        translate(["--keep-batchnorm-fp32=maybe"], TrainCommand)
    with pytest.raises(ConfigError, match="--no-cuda takes no value"):
        translate(["--no-cuda=1"], TrainCommand)


def test_own_flags_are_not_translated_and_translations_exist() -> None:
    own = {name for flag in flags_of(TrainCommand) for name in flag.names}
    assert not own & {*RENAMED, *FIXED, *REFUSED}
    assert own >= {*RENAMED.values(), *(flag for flag, _ in FIXED.values()), *BARE}
    named = {flag for text in REFUSED.values() for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)}
    assert named <= own


def test_the_folder_after_a_bare_pretrained_is_the_data(folder: Path) -> None:
    words = translate(["--pretrained", str(folder)], TrainCommand).arguments
    assert words == ["--pretrained", "default", str(folder)]


def test_bare_resume_explains_itself() -> None:
    assert not translate(["--b", "3", "--no-cuda", "--sync-bn", "True", "--pretrained"], TrainCommand).notes
    assert "newest run" in translate(["--resume"], TrainCommand).notes[0]


def test_batches_of_a_node_are_pointed_out() -> None:
    by_url = ["--dist-url", "tcp://a:1234", "--world-size", "1", "--rank", "0"]
    assert not translate(by_url, TrainCommand).notes
    for word in ("-b", "--b", "-j", "--batch_size"):
        assert "-b and -j are per worker" in translate([*by_url, word, "8"], TrainCommand).notes[0]
        assert not translate([word, "8"], TrainCommand).notes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-a resnet50 --b 8 -j 2 -p 5 --wd 0.1 --learning-rate 0.2", ("resnet50", 8, 2, 5, 0.1, 0.2)),
        ("--arch resnet50 --batch_size 8 --workers 2 --print_freq 5 --weight_decay .1 --learning_rate 0.2", None),
        ("--model resnet50 -b8 -j2 --print-freq=5 --weight-decay=0.1 --lr .2", None),
    ],
)
def test_short_long_and_underscored_names_are_one(words: str, expected: object) -> None:
    job = _read(words)
    got = (
        job.model.arch,
        job.batch_size,
        job.data.loader_workers,
        job.run.log_every,
        job.optim.weight_decay,
        job.optim.lr,
    )
    assert got == (expected or ("resnet50", 8, 2, 5, 0.1, 0.2))


def test_apexs_flags_are_read() -> None:
    job = _read("--opt-level O2 --loss-scale 128.0 --keep-batchnorm-fp32 True --sync_bn --channels-last True digits")
    assert (job.numerics.precision, job.numerics.loss_scale, job.numerics.keep_batchnorm_fp32) == ("O2", 128.0, True)
    assert (job.parallel.sync_bn, job.model.channels_last, job.data.dataset) == (True, True, "digits")
    job = _read("--opt-level=O1 --loss-scale dynamic --start-epoch 3 --dist-backend gloo --desired-acc 0.7 -e -r x")
    assert (job.numerics.loss_scale, job.parallel.dist_backend) == ("dynamic", "gloo")
    assert (job.run.start_epoch, job.run.desired_acc, job.run.evaluate, job.run.resume) == (3, 0.7, True, "x")
    assert _read("-r").run == RunConfig(resume="auto")


def test_the_command_translates_and_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--b", "4", "--no_cuda", "--nesterov", "False", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["batch_size"], printed["device"], printed["optim"]["nesterov"]) == (4, "cpu", False)
    assert main(["train", "--use-adasum"]) == 2
    assert "lockstep train: error: --use-adasum is an older script's flag: " in capsys.readouterr().err
    assert main(["train", "--resume", "--max-steps", "1"]) == 0
    assert capsys.readouterr().err.count("note: --resume without a value") == 1


def _read(words: str) -> TrainConfig:
    return parse_train(translate(shlex.split(words), TrainCommand).arguments).job
