"""`lockstep run --observe-dir`: steps and samples of scripts that know nothing of Lockstep."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import LOCKSTEP, TORCHRUN, Done, own_environment, run
from ports import free_port

from lockstep.files.jsonl import read_records

CASES = Path(__file__).parents[1] / "support/observed_cases.py"
START = """
import hashlib, os, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(104, 32, generator=generator), torch.randint(0, 10, (104,), generator=generator))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
batches = DataLoader(data, 8, sampler=DistributedSampler(data, size, rank))
loss_of, steps, samples = nn.functional.cross_entropy, 0, 0
"""
LOOP = """
for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(replica(x), y).backward()
        optimizer.step()
        steps, samples = steps + 1, samples + len(x)
"""
END = """
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("counted", rank, steps, samples, digest, flush=True)
"""
DDP = f"""{START}
dist.init_process_group("gloo")
replica = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
{LOOP}{END}
dist.destroy_process_group()
"""
SINGLE = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.ones(24, 4), 8):
    model(batch).mean().backward()
    optimizer.step()
"""
STARTED = """
import io, os, sys, torch
from torch import distributed as dist, multiprocessing

def train(rank):
    where = f"tcp://127.0.0.1:{sys.argv[1]}" if sys.argv[2:] else "env://"  # others hang under torchrun with torch 2.8
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 + 0.1 * rank)
    sys.stderr, is_named = io.StringIO(), torch.zeros(1)
    while not is_named:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        is_named.fill_("lockstep: " in sys.stderr.getvalue())
        dist.all_reduce(is_named)
    print(sys.stderr.getvalue(), end="")
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[2:]:
        multiprocessing.spawn(train, nprocs=2)
    else:
        train(int(os.environ["RANK"]))
"""
FSDP = f"""{START}
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (size,))
replica = fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
{LOOP}
print("counted", rank, steps, samples, "", flush=True)
dist.destroy_process_group()
"""
HVD = f"""{START}
from lockstep import hvd
hvd.init()
replica = model
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
{LOOP}{END}
"""
ALONE = f"""{START}
replica = model
optimizer = torch.optim.SGD(model.parameters(), 0.01)
{LOOP}{END}
"""
ACCELERATE = f"""{START}
from accelerate import Accelerator
own = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, batches = own.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, 8))
for epoch in range(3):
    for x, y in batches:
        with own.accumulate(model):
            own.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps, samples = steps + own.sync_gradients, samples + len(x)
print("counted", rank, steps, samples, "", flush=True)
own.end_training()
"""
ACCUMULATION = f"""{START}
dist.init_process_group("gloo")
replica = nn.parallel.DistributedDataParallel(model)
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
for epoch in range(3):
    for number, (x, y) in enumerate(batches, start=1):
        is_last = number % 3 == 0 or number == len(batches)
        with nullcontext() if is_last else replica.no_sync(), torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(replica(x), y)
        scaler.scale(loss / 3).backward()
        samples += len(x)
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps += 1
    with torch.no_grad():
        replica.eval()
        for x, y in DataLoader(data, 32):
            replica(x)
        replica.train()
{END}
dist.destroy_process_group()
""".replace("import hashlib", "from contextlib import nullcontext\nimport hashlib")
FABRIC = f"""{START}
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
batches = fabric.setup_dataloaders(DataLoader(data, 8, shuffle=True))
for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        fabric.backward(loss_of(model(x), y))
        optimizer.step()
        steps, samples = steps + 1, samples + len(x)
print("counted", rank, steps, samples, "", flush=True)
"""
TRAINER = f"""{START}
from transformers import Trainer, TrainingArguments
class Wrapped(nn.Module):
    samples = 0
    def forward(self, x=None, labels=None):
        self.samples += len(x) * self.training
        outputs = model(x)
        return {{"loss": loss_of(outputs, labels), "logits": outputs}}
wrapped = Wrapped()
wrapped.model = model
rows = [{{"x": x, "labels": y}} for x, y in data]
settings = dict(num_train_epochs=3, per_device_train_batch_size=8, gradient_accumulation_steps=2, eval_steps=2)
quiet = dict(use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no")
trainer = Trainer(
    wrapped, TrainingArguments("out", eval_strategy="steps", **settings, **quiet), train_dataset=rows,
    eval_dataset=rows[:16]
)
trainer.train()
print("counted", rank, trainer.state.global_step, wrapped.samples, "", flush=True)
"""
LIGHTNING = f"""{START}
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.samples = model, 0
    def training_step(self, batch, index):
        self.samples += len(batch[0])
        return loss_of(self.model(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.model(batch[0])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
own = Module()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=size, strategy="ddp", **quiet)
trainer.fit(own, DataLoader(data, 8), DataLoader(data, 8))
print("counted", rank, trainer.global_step, own.samples, "", flush=True)
"""


def _observe(program: str, folder: Path, **variables: str) -> Done:
    (folder / "program.py").write_text(program)
    command = [*LOCKSTEP, "run", "-np", "2", "--observe-dir", "observed", "--", sys.executable, "program.py"]
    done = run(command, folder, own_environment(**variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _counted(done: Done) -> list[list[str]]:
    return sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("counted"))


def _rows(done: Done) -> list[list[str]]:
    """Return the rows of the table of ranks, steps, samples and times that the launcher prints."""
    lines = done.stdout.partition("observed steps")[2].splitlines()[2:]
    return [line.replace(",", "").split() for line in lines if line.strip()]


def _check_rows(done: Done) -> list[list[str]]:
    rows = _rows(done)
    assert [row[:3] for row in rows] == [each[:3] for each in _counted(done)]
    return rows


def test_a_ddp_script_is_observed_without_changing_it(tmp_path: Path) -> None:
    done = _observe(DDP, tmp_path)
    plain = run([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "program.py"], tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert _counted(done) == _counted(plain), "the weights differ"
    for row in _check_rows(done):
        assert float(row[3]) > 0
        assert len(row) == 4 + len(("data", "forward", "other", "backward", "waiting", "optimizer"))
    first, *_, last = read_records(tmp_path / "observed/metrics.jsonl")
    assert (first["kind"], first["workers"]) == ("run", 2)
    assert (last["kind"], last["step"]) == ("end", 21)


def test_a_program_without_a_launcher_is_observed_if_asked(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SINGLE)
    done = run([sys.executable, "program.py"], tmp_path, own_environment(LOCKSTEP_OBSERVE="observed"))
    assert done.returncode == 0, done.stderr
    first, *_, last = read_records(tmp_path / "observed/metrics.jsonl")
    assert (first["kind"], first["workers"]) == ("run", 1)
    assert (last["kind"], last["step"], last["exit_code"]) == ("end", 3, 0)


@pytest.mark.parametrize("by", [pytest.param("mp.spawn", marks=pytest.mark.long), "torchrun"])
def test_workers_that_the_only_worker_starts_are_compared(by: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STARTED)
    command = [sys.executable, "program.py", str(free_port()), "spawn"]
    if by == "torchrun":
        command = [*TORCHRUN, "--master-port", str(free_port()), *command[1:-1]]
    done = run([*LOCKSTEP, "run", "-np", "1", "--", *command], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the settings of their optimizers differ (learning rates 0.1, 0.2)") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the I/O of processes")
@pytest.mark.parametrize("launcher", ["lockstep run", "torchrun"])
def test_bytes_that_a_ddp_script_reads_are_recorded(launcher: str, tmp_path: Path) -> None:
    size = 2_000_000
    (tmp_path / "sample").write_bytes(bytes(size))
    reads = """
class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 104
    def __getitem__(self, index):
        with open("sample", "rb") as file:
            assert len(file.read()) == 2_000_000
        return data[index]
batches = DataLoader(Files(), 8, sampler=DistributedSampler(data, size, rank), num_workers=rank,
                     multiprocessing_context="fork" if rank else None)
"""
    (tmp_path / "program.py").write_text(DDP.replace("loss_of, steps", f"{reads}\nloss_of, steps"))
    own = [*LOCKSTEP, "run", "-np", "2", "--observe-dir", "observed", "--", sys.executable, "program.py"]
    variables = {"LOCKSTEP_OBSERVE": "observed"} if launcher == "torchrun" else {}
    done = run([*TORCHRUN, "program.py"] if launcher == "torchrun" else own, tmp_path, own_environment(**variables))
    assert done.returncode == 0, done.stdout + done.stderr
    each = 3 * 52 * size  # three epochs of half of the samples; on rank 1 by a loader process
    for rank in range(2):
        records = list(read_records(tmp_path / f"observed/io/worker-{rank}.jsonl"))
        assert each <= sum(record["read_bytes"] for record in records) < 1.5 * each  # and torch's modules
        assert sum(record["read_operations"] for record in records) >= 3 * 52
        assert all(("node_disk_reads" in record) is (rank == 0) for record in records)


@pytest.mark.parametrize("program", [pytest.param(FSDP, id="FSDP2"), pytest.param(HVD, id="hvd")])
def test_steps_of_other_strategies_are_counted(program: str, tmp_path: Path) -> None:
    _check_rows(_observe(program, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ACCELERATE, id="Accelerate"),
        pytest.param(TRAINER, id="Trainer"),
        pytest.param(FABRIC, id="Fabric"),
        pytest.param(ACCUMULATION, id="accumulation"),
    ],
)
def test_steps_of_other_frameworks_are_counted(program: str, tmp_path: Path) -> None:
    _check_rows(_observe(program, tmp_path))


@pytest.mark.long
def test_steps_of_lightning_are_counted(tmp_path: Path) -> None:
    _check_rows(_observe(LIGHTNING, tmp_path))


def test_every_kind_of_loop_is_counted_exactly(tmp_path: Path) -> None:
    done = run([sys.executable, CASES], tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 15
    assert {name: observed for name, (_, observed) in results.items()} == {
        name: counted for name, (counted, _) in results.items()
    }


def test_the_forward_pass_of_a_closure_is_not_the_optimizers(tmp_path: Path) -> None:
    loop = """
for x, y in batches:
    def closure():
        import time; time.sleep(0.4)
        loss = loss_of(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
    steps += 1
    if steps == 3:
        break
"""
    _observe(f"{START}\noptimizer = torch.optim.SGD(model.parameters())\n{loop}", tmp_path)
    (last,) = (each for each in read_records(tmp_path / "observed/metrics.jsonl") if each["kind"] == "epoch")
    for forward, optimizer in zip(last["phase_seconds"]["forward"], last["phase_seconds"]["optimizer"], strict=True):
        assert forward >= 2 * 0.4 > optimizer  # the first step is not timed


def test_steps_before_and_after_a_restart_are_counted(tmp_path: Path) -> None:
    script = f"""{START}
optimizer = torch.optim.SGD(model.parameters())
for x, y in batches:
    loss_of(model(x), y).backward()
    optimizer.step()
    if not os.path.exists("failed"):
        open("failed", "w").close()
        raise SystemExit(3)
"""
    (tmp_path / "program.py").write_text(script)
    flags = ["-np", "1", "--max-restarts", "1", "--observe-dir", "observed"]
    done = run([*LOCKSTEP, "run", *flags, "--", sys.executable, "program.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[:3] for row in _rows(done)] == [["0", str(1 + 13), str(8 * (1 + 13))]]


@pytest.mark.parametrize(("program", "phase"), [(HVD, "forward"), (ALONE, "")])  # DDP: test_launcher_table
def test_a_slow_rank_of_a_program_is_named_once(program: str, phase: str, tmp_path: Path) -> None:
    slow = program.replace("range(3)", "range(22)").replace(
        "loss_of(replica(x), y)", "(rank == 1 and time.sleep(0.05)) or loss_of(replica(x), y)"
    )
    slow = slow.replace("import hashlib", "import time, hashlib")
    done = _observe(slow, tmp_path, LOCKSTEP_STRAGGLER_SECONDS="1")
    lines = [line for line in done.stderr.splitlines() if "slows all others down" in line]
    assert len(lines) == bool(phase), done.stderr
    records = [each for each in read_records(tmp_path / "observed/metrics.jsonl") if each["kind"] == "straggler"]
    assert [(each["ranks"], each["phase"]) for each in records] == ([([1], phase)] if phase else [])


def test_unobserved_programs_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"""{HVD}
import sys
from lockstep.hvd.engine import context
print("observer", sys.modules["lockstep.world.observer"].current, bool(context.get().step_times.take_ready()))
""")
    done = run([*LOCKSTEP, "run", "-np", "2", "--no-observe", "--", sys.executable, "program.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("observer None False") == 2


def test_a_failing_observer_turns_itself_off(tmp_path: Path) -> None:
    broken = "\nfrom lockstep.world.observer import Observer\nObserver.publish = lambda self: 1 / 0\n"
    done = _observe(DDP.replace(START, START + broken), tmp_path)
    assert len(_counted(done)) == 2
    assert done.stderr.count("this worker is not observed any more: ZeroDivisionError") == 2
    assert "no steps of an optimizer of torch were seen" in done.stdout
