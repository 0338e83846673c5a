"""Each extra, installed alone with the package, does what its documentation promises, without any network."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import alone
import pytest
from commands import of_one_thread, run
from fresh_environments import build, install
from pages import ROOT, blocks, pages

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = re.compile(r"(?:lockstep-(?:torch|horovod)\\*|'\.|horovod)\[([\w-]+)\]")
OFFLINE = alone.COMMAND if os.geteuid() == 0 and shutil.which("unshare") else []
TRAIN = "lockstep train -np 2 --device cpu --epochs 1 --run-dir run"
RUNS = """
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
print(run.info.run_name, run.info.status, run.data.metrics["Top1/val"])
"""
JPEG = """
from io import BytesIO
import torch
from PIL import Image
from lockstep.data.device_decode import batch_decoder
file = BytesIO()
Image.new("RGB", (16, 8)).save(file, "JPEG")
decode = batch_decoder(torch.device("cuda" if torch.cuda.is_available() else "cpu"), 3)
(image,) = decode([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])
print(decode.func.__module__, tuple(image.shape))
"""
LIGHTNING = """
import torch
import lightning.pytorch as pl
from lockstep.lightning import LockstepStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Net()
trainer = pl.Trainer(accelerator="cpu", strategy=LockstepStrategy(), max_epochs=2)
trainer.fit(model, torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))
print("trained", trainer.global_step, "steps on", trainer.world_size)
"""


def _script(page: str, text: str) -> str:
    """Return the Python script of a page that contains `text`."""
    (block,) = (each for each in blocks(ROOT / page) if each.language == "python" and text in each.text)
    return block.text


@dataclass(frozen=True)
class Use:
    """A shell command that needs an extra, what it must print, and the script.py that it runs."""

    command: str
    prints: str
    script: str = ""


FRAMEWORKS = "docs/howto/migrate-from-horovod.md"
USES = {
    "mlflow": Use(f"{TRAIN} --track mlflow && python script.py", r"run FINISHED 0\.\d+", RUNS),
    "wandb": Use(f"WANDB_MODE=offline {TRAIN} --track wandb && ls run/wandb/offline-run-*", r"run-\w+\.wandb"),
    "timm": Use(f"{TRAIN} -a timm/test_resnet --max-steps 3", "test_resnet .* parameters"),
    "onnx": Use(f"{TRAIN} && lockstep export run --format onnx", r"run\.onnx: .* its logits differ"),
    "gpu-decode": Use("python script.py", r"torchcodec\S* \(3, 8, 16\)", JPEG),
    "ray": Use("python script.py", r"\[\(0, (\S+)\), \(1, \1\)\]", _script(FRAMEWORKS, "RayExecutor")),
    "lightning": Use("lockstep run -np 2 -- python script.py", "trained 4 steps on 2", LIGHTNING),
}
REFUSED = {
    "mlflow": USES["mlflow"].command,
    "wandb": USES["wandb"].command,
    "timm": USES["timm"].command,
    "onnx": USES["onnx"].command,
    "ray": "python -c 'import horovod.ray'",
    "lightning": "python -c 'import lockstep.lightning'",
}
"""Commands that fail without an extra. `--decode gpu` also fails without a GPU."""


def test_every_extra_is_used_and_every_named_extra_exists() -> None:
    assert USES.keys() == EXTRAS.keys()
    files = [*pages(), *(ROOT / "src").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    named = {(name, file) for file in files for name in NAMED.findall(file.read_text())}
    assert {name for name, _ in named} == EXTRAS.keys(), named


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is removed, unlike `tmp_path`, with a name that is short enough for Ray's sockets."""
    with TemporaryDirectory(prefix="extra") as path:
        yield Path(path)


def _run(command: str, environment: Path, folder: Path) -> tuple[int, str]:
    """Run a shell command in an activated environment; return its exit code and output."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    env = of_one_thread(PATH=path, PYTHONPATH="", HOME=str(home), TMPDIR=str(home), RAY_TMPDIR=str(home))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        env.pop(name, None)
    done = run([*OFFLINE, "sh", "-c", command], folder, env, alone.LIMIT_SECONDS, cold=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.timeout(1200)  # where nothing is in uv's cache, torch is 3 GB
@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone_is_enough_for_its_use(extra: str, wheels: list[Path], folder: Path) -> None:
    horovod, package = wheels
    install(folder / "venv", "-c", ROOT / "constraints.txt", f"{package}[{extra}]", horovod)
    use = USES[extra]
    (folder / "script.py").write_text(use.script)
    code, output = _run(use.command, folder / "venv", folder)
    assert code == 0, output
    assert re.search(use.prints, output), output


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_without_an_extra_the_error_names_it(wheels: list[Path], folder: Path) -> None:
    install(folder / "venv", "-c", ROOT / "constraints.txt", *wheels)
    for extra, command in REFUSED.items():
        code, output = _run(command, folder / "venv", folder)
        assert code != 0, extra
        distribution = "lockstep-horovod" if extra == "ray" else "lockstep-torch"
        assert f"pip install '{distribution}[{extra}]'" in output, output
