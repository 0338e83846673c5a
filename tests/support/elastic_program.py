"""Train with `hvd.elastic.run`: `elastic_program.py FOLDER DEVICE LAST_STEP`, until that step or a file FOLDER/end.

Rank 0 records in FOLDER/metrics.jsonl where each generation continues, and each commit, and writes the final state to
FOLDER/final.safetensors.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep import hvd

BATCH, SAMPLES, COMMIT_STEPS = 4, 100, 3
folder, kind, last_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if kind == "simgpu":
    import simgpu

    simgpu.install(3)
hvd.init()
device = torch.device("cpu")
if kind == "simgpu":
    device = torch.device("simgpu", hvd.local_rank())
    torch.accelerator.set_device_index(device.index)
torch.manual_seed(0)
data = torch.randn(SAMPLES, 6, dtype=torch.double)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
sampler = hvd.elastic.ElasticSampler(data, seed=3)


def record(kind: str, state: Any) -> None:
    if hvd.rank() == 0:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": state.step}) + "\n")


@hvd.elastic.run
def train(state: Any) -> None:
    record("run", state)
    while not hvd.broadcast_object(state.step == last_step or (folder / "end").exists(), 0):
        batch = data[[*itertools.islice(sampler, BATCH)]].to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        sampler.record_batch(state.step, BATCH)
        sampler.reset()
        if not sampler.remaining_indices:
            sampler.set_epoch(sampler.epoch + 1)
        state.step += 1
        if state.step % COMMIT_STEPS == 0:
            state.commit()
            record("step", state)


state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, step=0)
train(state)
if hvd.rank() == 0:
    moments = {f"moment {key}": each["exp_avg_sq"] for key, each in optimizer.state_dict()["state"].items()}
    counts = {"step": torch.tensor(state.step), "epoch": torch.tensor(sampler.epoch)}
    tensors = {**model.state_dict(), **moments, **counts}
    save_file({name: each.cpu() for name, each in tensors.items()}, folder / "final.safetensors")
