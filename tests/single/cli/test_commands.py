"""The command line in one process: what each command prints, and what it says of wrong words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision import models

from lockstep.cli import COMMANDS, horovodrun, main, prepare_streams
from lockstep.cli.data import ACTIONS
from lockstep.config import recipes
from lockstep.data.catalog import NAMED
from lockstep.data.sources import digits

PUBLISHED = Path(__file__).parents[3] / "examples" / "studies" / "published.jsonl"


@pytest.fixture
def run(here: Path) -> Path:
    """A short run on the digits."""
    assert main(["train", "digits", "--max-steps", "3", "--run-dir", "a-run"]) == 0
    return here / "a-run"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("parser", "command", "words", "name"),
    [
        ("lockstep.cli.train.parse_train", main, ["train", "digits"], "lockstep"),
        ("lockstep.cli.horovodrun.parse_flags", horovodrun.main, ["-np", "2", "true"], "horovodrun"),
    ],
)
def test_ctrl_c_before_a_job_has_started_is_one_line(
    parser: str,
    command: Callable[[list[str]], int],
    words: list[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parser, _interrupt)
    assert command(words) == 130
    assert capsys.readouterr().err == f"\n{name}: interrupted\n"


def test_closed_streams_are_replaced_under_their_own_numbers() -> None:
    pid = os.fork()
    if not pid:
        code = 1
        with suppress(BaseException):
            for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
                os.close(number)
                setattr(sys, name, None)
            prepare_streams()
            print("to nobody", file=sys.stdout, flush=True)
            numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
            if numbers == [0, 1, 2] and not sys.stdout.isatty() and all(map(os.get_inheritable, numbers)):
                code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.cold
def test_help_and_work_on_files_import_no_torch(folder: Path, here: Path) -> None:
    helped = [*COMMANDS, *(f"data {action}" for action in ACTIONS)]
    lines = [f"{command} --help" for command in ("", *helped)] + ["models", f"study predict {PUBLISHED}"]
    lines += [f"data {words} -j 1" for words in ("pack images packed", "verify packed", "verify images")]
    code = (
        "import sys\nfrom lockstep.cli import horovodrun, main\nabsent = {'torch', 'numpy', 'rich'}\n"
        f"for line in {lines}:\n"
        "    try: code = main(line.split())\n    except SystemExit as stopped: code = stopped.code\n"
        "    assert not code and not absent & sys.modules.keys(), line\n    absent = {'torch'}\n"
        "horovodrun.main(['-v'])\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(command in done.stdout.split("usage: ")[1] for command in COMMANDS)
    assert [command for command in helped if f"usage: lockstep {command}" not in done.stdout] == []
    assert done.stdout.endswith("0.28.1\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep 0.")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "did you mean `lockstep train`?"),
        (["train", "cifar01"], "did you mean cifar10?"),
        (["train", "nowhere/images"], "nowhere/images does not exist"),
        (["train", "imagenet"], "put its train/ and val/ class folders"),
        (["train", "--config", "mnits"], "did you mean mnist?"),
        (["train", "-a", "resnet19", "--epochs", "1"], "did you mean resnet18?"),
        (["train", "-np", "2", "--strategy", "single"], "use --strategy ddp"),
        (["train", "-np", "3", "--global-batch-size", "2"], "make it 3 or more"),
        (["data", "get", "mnits"], "did you mean mnist?"),
        (["data", "get", "digits"], "cannot be downloaded"),
        (["eval", "nowhere"], "is not a checkpoint and contains none"),
        (["predict", "nowhere", "x.png"], "is not a checkpoint and contains none"),
    ],
)
def test_wrong_arguments_name_the_fix(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert main(words) != 0
    assert hint in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_print_config_is_a_recipe_that_gives_the_same_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mnist", "--lr", "0.5", "--no-nesterov", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["optim"]["lr"] == 0.5
    Path("mine.yaml").write_text(printed)
    assert main(["train", "--config", "mine.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_a_run_folder_has_everything_and_serves_eval_and_predict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints", "logs"}
    log = (run / "logs" / "worker-0.log").read_text()
    assert "run folder a-run" in log
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    evaluated = capsys.readouterr().out
    share = evaluated.split("top-1 ")[1].split(" %")[0]
    assert f"top-1 {share} %" in log
    assert "of 360 images right" in evaluated
    assert main(["train", "-e", "--resume", str(run)]) == 0
    assert capsys.readouterr().out == evaluated

    image = digits.load().val.images[0, 0].numpy()  # type: ignore[union-attr]
    Image.fromarray(image).save("digit.png")
    Image.fromarray(np.kron(image, np.ones((4, 4), np.uint8))).convert("RGB").save("large.jpg")
    assert main(["predict", str(run), "digit.png", "large.jpg", "--top", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["digit.png", "large.jpg"]
    shares = [float(word) for word in lines[0].replace("%", "").split(":")[1].split()[1::2]]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert shares == sorted(shares, reverse=True)


def test_eval_refuses_another_data_sets_classes(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), str(folder)]) == 5
    assert "has the classes 0, 1, 2, 3 and 6 more, but images has blue, red" in capsys.readouterr().err


def test_resume_of_another_job_is_refused_by_the_flag(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--resume", str(run), "--seed", "3"]) == 5
    assert "--seed 0, not 3" in capsys.readouterr().err
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 0  # the old run is as it was


def test_resume_auto_goes_on_in_the_newest_run_of_the_same_kind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--max-steps", "2"]) == 0
    assert main(["train", "digits", "--max-steps", "4", "--resume", "auto"]) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    (run,) = (here / "runs").iterdir()
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_folder_of_images_trains_in_memory_and_as_a_stream(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["train", str(folder), "-b", "10", "--epochs", "1", "--lr", "0.01"]
    assert main([*common, "-a", "cifar-small", "--run-dir", "memory"]) == 0
    stream = ["-a", "mobilenet_v3_small", "--in-memory", "never", "--image-size", "32", "-j", "2"]
    assert main([*common, *stream, "--run-dir", "stream"]) == 0
    assert capsys.readouterr().out.count("of 10 validation images right") == 2
    assert main(["eval", "stream", str(folder), "--in-memory", "never", "--image-size", "32", "-j", "0"]) == 0
    capsys.readouterr()
    assert main(["predict", "stream", *map(str, sorted((folder / "val" / "red").iterdir()))]) == 0
    predicted = capsys.readouterr().out
    assert main(["predict", "stream", str(folder / "val" / "red")]) == 0
    assert capsys.readouterr().out == predicted


def test_how_to_go_on_follows_a_worker_that_a_signal_ended(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--max-steps", "2", "--run-dir", "run", "--quiet"]) == 0
    for number in (signal.SIGKILL, signal.SIGSEGV):
        monkeypatch.setattr("lockstep.cli.train.run_workers", lambda command, code=128 + number: code)
        assert main(["train", "--resume", "run"]) == 128 + number
        assert capsys.readouterr().err.startswith("lockstep: the newest checkpoint is from step 2, ")


def test_your_own_data_and_model_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(60, 2, 4, 4); y = (x.mean((1, 2, 3)) > 0).long()\n"
        "    return TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])\n"
        "def net(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, num_classes))\n"
    )
    assert main(["train", "--data", "mine:data", "--model", "mine:net", "--epochs", "2", "-b", "8", "-j", "0"]) == 0
    assert "40 + 20 images, 2 classes" in capsys.readouterr().out
    assert main(["train", "--data", "mine:nothing", "--model", "mine:net"]) == 2
    assert "has no function 'nothing'" in capsys.readouterr().err


def test_code_named_by_a_file_runs_only_if_the_user_names_it_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("strangers.py").write_text(
        "import pathlib, torch\npathlib.Path('ran').touch()\n"
        "def net(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
    )
    assert main(["train", "--model", "strangers:net", "--max-steps", "2", "--run-dir", "a-run"]) == 0
    Path("ran").unlink()
    sys.modules.pop("strangers")
    file = "a-run/model.safetensors"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("digit.png")
    uses = [
        ["eval", file],
        ["train", "digits", "-e", "--resume", "a-run"],
        ["predict", file, "digit.png"],
        ["export", file, "-o", "net.pt2"],
    ]
    capsys.readouterr()
    for words in uses:
        assert main(words) == 5
        assert "add -a strangers:net" in capsys.readouterr().err
    assert not Path("ran").exists()
    for words in uses:
        assert main([*words, "--model", "strangers:net"]) == 0
    assert Path("ran").exists()


def test_another_network_than_the_files_own_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uses = [["eval", "a-run"], ["train", "-e", "--resume", "a-run"], ["export", "a-run", "-o", "net.safetensors"]]
    for words in uses:
        assert main([*words, "-a", "mnist-net"]) == 5
        assert "a-run contains digits-net, not -a mnist-net" in capsys.readouterr().err
        assert main([*words, "-a", "digits-net"]) == 0
    # Here mnist-net is the recipe's choice, and nothing that the user named.
    assert main(["train", "-e", "--config", "mnist", "--resume", "a-run"]) == 0


def test_published_weights_are_evaluated_as_they_are(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(here))
    arch = "shufflenet_v2_x0_5"
    for number in range(1000):
        for split in ("train", "val"):
            path = here / "thousand" / split / f"{number:04d}" / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), (number % 256, number // 4, 0), np.uint8)).save(path)
    cache = here / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.manual_seed(0)
    published = cache / Path(models.get_model_weights(arch).DEFAULT.url).name
    torch.save(models.get_model(arch).state_dict(), published)
    evaluate = ["train", "thousand", "-a", arch, "--image-size", "32", "-e", "-j", "0"]
    assert main([*evaluate, "--resume", str(published)]) == 0
    expected = capsys.readouterr().out
    assert "of 1,000 images right" in expected
    for words in (["--pretrained", "default"], ["--pretrained"], ["--pretrained", str(published)]):
        assert main([*evaluate, *words]) == 0
        assert capsys.readouterr().out == expected
    assert not (here / "runs").exists()


def test_weights_of_other_classes_are_not_evaluated(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(models.get_model("shufflenet_v2_x0_5").state_dict(), "thousand.pth")
    words = ["train", "-e", "--pretrained", "thousand.pth", "-a", "shufflenet_v2_x0_5", "--image-size", "32"]
    assert main([*words, str(folder)]) == 5
    assert "the weights have 1,000 classes, but the data has 2" in capsys.readouterr().err
    assert main(words) == 2
    assert "name the data set or folder" in capsys.readouterr().err


def test_the_list_of_data_sets_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines), lines
    for name, entry in NAMED.items():  # each in one line, and nothing of it cut off
        row = [name, entry.samples, entry.images, recipes.for_source(name), entry.about]
        assert re.sub(" +", " ", " ".join(row)) in [re.sub(" +", " ", line).strip() for line in lines]
