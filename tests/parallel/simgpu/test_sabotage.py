"""A wait or a record that is removed from Lockstep fails a test on the simulated GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = Path("src/lockstep")


@dataclass(frozen=True)
class Sabotage:
    """A line of a module to remove, or to replace, and the test that must notice it.

    Args:
        test: A test below tests/parallel/simgpu.
    """

    module: str
    line: str
    test: str
    replacement: str = "pass"


SNAPSHOT, PREFETCH = "run/checkpoints/snapshot.py", "data/loaders.py"
REDUCTIONS = "test_hvd.py::test_reductions_follow_the_streams_that_write_and_read"
ORDER = "test_hvd_order.py"
SABOTAGES = [
    Sabotage(
        SNAPSHOT,
        "self._side.wait_stream(accelerator.current_stream(self._device))",
        "test_waits.py::test_a_snapshot_holds_the_state_of_its_step",
    ),
    Sabotage(
        SNAPSHOT,
        "accelerator.current_stream(self._device).wait_event(self._copied)",
        "test_waits.py::test_a_snapshot_holds_the_state_of_its_step",
    ),
    Sabotage(SNAPSHOT, "copied.synchronize()", "test_waits.py::test_a_snapshot_holds_the_state_of_its_step"),
    Sabotage(
        SNAPSHOT,
        "self._held.append(tensor)  # keeps its memory from being reused before it is copied",
        "test_waits.py::test_a_snapshot_holds_the_state_of_its_step",
    ),
    Sabotage(
        SNAPSHOT,
        "{name: tensor.clone() for name, tensor in tensors.items()} if self._side else tensors",
        "test_trainer.py::test_slow_copies_do_not_change_checkpoints",
        replacement="tensors",
    ),
    Sabotage(
        "train/loop.py", "job.session.copies.protect()", "test_trainer.py::test_slow_copies_do_not_change_checkpoints"
    ),
    Sabotage(
        PREFETCH, "side.wait_stream(used_by)", "test_waits.py::test_prefetched_batches_are_whole_when_they_are_used"
    ),
    Sabotage(
        PREFETCH, "used_by.wait_stream(side)", "test_waits.py::test_prefetched_batches_are_whole_when_they_are_used"
    ),
    Sabotage(
        PREFETCH,
        "tensor.record_stream(used_by)  # the side stream must not reuse this memory too early",
        "test_waits.py::test_prefetched_batches_are_whole_when_they_are_used",
    ),
    Sabotage("hvd/engine/fusion.py", "stream.wait_event(request.written)", ORDER),
    Sabotage("hvd/engine/fusion.py", "tensor.record_stream(stream)", REDUCTIONS),
    Sabotage(
        "hvd/engine/transfers.py",
        "accelerator.use(device)  # the engine's thread starts with device 0 as its current one",
        "test_hvd.py::test_a_worker_uses_its_own_gpu_alone",
    ),
    Sabotage("hvd/engine/request.py", "stream.wait_event(self.ready)", ORDER),
    Sabotage("hvd/engine/request.py", "tensor.record_stream(stream)", REDUCTIONS),
    Sabotage(
        "hvd/optimizer/gradient_reducer.py",
        "self._wait_for(bucket)\n                except HorovodInternalError:  # `finish` raises it",
        "test_hvd.py::test_a_forgotten_reduction_writes_to_no_freed_gradient",
        "pass\n                except HorovodInternalError:",
    ),
    Sabotage(
        "hvd/elastic/state.py",
        "engine.current.settle()",
        "test_scripts.py::test_a_lost_worker_is_replaced_and_no_step_is_lost",
    ),
    Sabotage("train/precision.py", "copied.synchronize()", "test_loss_scaling.py::test_scale_changes_as_on_the_host"),
    Sabotage(
        "train/strategies/powersgd.py",
        "accelerator.current_stream(error.device).synchronize()",
        "test_trainer.py::test_two_gpus_train_as_two_cpus[PowerSGD]",
    ),
    Sabotage("world/step_clock.py", "clock.wait_for(mark)", "test_step_clock.py::test_phases_take_the_devices_time"),
    Sabotage(
        "world/step_clock.py",
        "accelerator.synchronize(self.clock.device)",
        "test_step_clock.py::test_phases_take_the_devices_time",
    ),
    Sabotage("world/step_clock.py", "timestamp.synchronize()", "test_waits.py::test_a_clock_reads_the_devices_time"),
    Sabotage(
        "world/accelerator.py",
        "torch.accelerator.set_stream(before)",
        "test_waits.py::test_a_side_stream_is_waited_for_on_the_device",
    ),
    Sabotage(
        "world/accelerator.py",
        "torch.accelerator.set_device_index(index)",
        "test_waits.py::test_a_side_stream_is_waited_for_on_the_device",
    ),
]


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: f"{each.module}: {each.line:.40}")
def test_a_removed_wait_is_noticed(tmp_path: Path, sabotage: Sabotage) -> None:
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    module = tmp_path / PACKAGE / sabotage.module
    text = module.read_text()
    assert text.count(sabotage.line) == 1
    module.write_text(text.replace(sabotage.line, sabotage.replacement))
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    test = ROOT / "tests/parallel/simgpu" / sabotage.test
    done = subprocess.run([*command, test], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "AssertionError" in done.stdout
