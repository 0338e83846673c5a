"""Lightning's trainer with Lockstep's strategy: two workers do what one does with batches twice as large."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from commands import LOCKSTEP, of_one_thread, run

pytestmark = pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning")

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from lockstep import hvd
from lockstep.lightning import LockstepStrategy

folder, batch = Path(sys.argv[1]), int(sys.argv[2])
samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(samples, samples.sum(1, keepdim=True))

class Net(pl.LightningModule):
    def __init__(self, by_hand=False):
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))  # rank 0's weights count
        self.layer, self.mean = torch.nn.Linear(4, 1), MeanMetric()
        self.automatic_optimization = not by_hand

    def loss(self, batch):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.mean.update(self.loss(batch), weight=len(batch[0]))
        self.log("mean", self.mean)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

def trained(name, epochs=2, by_hand=False, checkpoint=None, options=(), **settings):
    model, strategy = Net(by_hand), LockstepStrategy(**dict(options))
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder / name, **settings
    )
    trainer.fit(model, DataLoader(data, batch), DataLoader(data, batch), ckpt_path=checkpoint)
    found = {key: value.item() for key, value in trainer.callback_metrics.items()}
    found |= {"weights": model.layer.weight.tolist()[0], "rank": trainer.global_rank, "size": trainer.world_size}
    found |= {"steps": trainer.global_step, "checkpoint": trainer.checkpoint_callback.best_model_path}
    assert not hvd.is_initialized() and not torch.distributed.is_initialized()
    return found

found = {
    "plain": trained("plain"),
    "accumulated": trained("accumulated", accumulate_grad_batches=4, gradient_clip_val=0.1),
    "by hand": trained("by hand", by_hand=True),
    "bfloat16": trained("bfloat16", precision="bf16-mixed"),
    "sum": trained("sum", options={"op": hvd.Sum}),
}
first = trained("first", epochs=1)
found["resumed"] = trained("resumed", epochs=2, checkpoint=first["checkpoint"])
(folder / f"{found['plain']['rank']}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the workers found, by rank, of one alone and of two."""
    outcomes = {}
    for name, words, batch in (("one", [], 8), ("two", [*LOCKSTEP, "run", "-np", "2", "--"], 4)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "script.py").write_text(SCRIPT)
        done = run([*words, sys.executable, folder / "script.py", folder, batch], folder, of_one_thread())
        assert done.returncode == 0, done.stderr
        outcomes[name] = [
            json.loads((folder / f"{rank}.json").read_text()) for rank in range(1 if name == "one" else 2)
        ]
    return outcomes


@pytest.mark.parametrize("kind", ["plain", "accumulated", "by hand", "bfloat16", "resumed"])
def test_two_workers_train_and_validate_as_one(kind: str, found: dict[str, list[dict[str, Any]]]) -> None:
    (alone,), both = ([each[kind] for each in found[name]] for name in ("one", "two"))
    assert [(each["rank"], each["size"]) for each in both] == [(0, 2), (1, 2)]
    assert alone["size"] == 1
    tolerance = {"abs": 0.02, "rel": 0.02} if kind == "bfloat16" else {"abs": 1e-5}
    for each in both:
        assert each["weights"] == both[0]["weights"]
        assert each["weights"] == pytest.approx(alone["weights"], **tolerance)
        assert (each["loss"], each["mean"]) == pytest.approx((alone["loss"], alone["mean"]), **tolerance)
        assert each["steps"] == alone["steps"]


def test_resuming_changes_nothing(found: dict[str, list[dict[str, Any]]]) -> None:
    for each in [*found["one"], *found["two"]]:
        assert each["resumed"]["weights"] == each["plain"]["weights"]
        assert each["resumed"]["steps"] == each["plain"]["steps"]


def test_options_are_those_of_horovods_optimizer(found: dict[str, list[dict[str, Any]]]) -> None:
    one, two = found["one"][0], found["two"][0]
    assert one["sum"]["weights"] == one["plain"]["weights"]
    assert two["sum"]["weights"] != two["plain"]["weights"]
    assert two["accumulated"]["steps"] == 4
