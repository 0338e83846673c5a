"""Scripts for Hugging Face's trainer and for Accelerate, unchanged in workers of `lockstep run`."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import HOROVODRUN, LOCKSTEP, of_one_thread, run

from lockstep.models.nested import cast

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers and accelerate"
)

TRAINER = """
import json, sys
from pathlib import Path
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

folder, batch = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
words = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row[0] % 2} for row in words]
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, num_train_epochs=2,
    optim="sgd", learning_rate=0.1, seed=1, average_tokens_across_devices=False,
    report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
weights = trainer.model.classifier.weight[0].tolist()
found = {"size": arguments.world_size, "weights": weights, "loss": trainer.evaluate()["eval_loss"]}
(folder / f"{arguments.process_index}.json").write_text(json.dumps(found))
"""

ACCELERATE = """
import json, sys
from pathlib import Path
import torch
from accelerate import Accelerator

folder, batch = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
samples = torch.randn(32, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, samples.sum(1, keepdim=True)), batch)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
weights = accelerator.unwrap_model(model).weight[0].tolist()
found = {"size": accelerator.num_processes, "weights": weights, "loss": accelerator.reduce(loss, "mean").item()}
(folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
"""

HOROVOD = """
import json, sys
from pathlib import Path
import horovod.torch as hvd
import torch
from accelerate import Accelerator
from torch.utils.data import DistributedSampler

hvd.init()
data = torch.utils.data.TensorDataset(torch.arange(32))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(data, 4, sampler=sampler))
seen = [sample for batch, in loader for sample in batch.tolist()]
found = {"size": accelerator.num_processes, "seen": hvd.allgather_object(seen)}
(Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(found))
"""


def found(script: str, workers: int, folder: Path) -> list[dict[str, Any]]:
    """What each worker found, by rank; together they take eight samples a step."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    words = [*LOCKSTEP, "run", "-np", workers, "--"] if workers > 1 else []
    done = run([*words, sys.executable, folder / "script.py", folder, 8 // workers], folder, of_one_thread())
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


@pytest.mark.parametrize("script", [TRAINER, ACCELERATE], ids=["Trainer", "Accelerate"])
def test_two_workers_train_as_one(script: str, tmp_path: Path) -> None:
    (alone,), both = found(script, 1, tmp_path / "one"), found(script, 2, tmp_path / "two")
    assert [each["size"] for each in (alone, *both)] == [1, 2, 2]
    for each in both:
        assert each["weights"] == both[0]["weights"]
        assert each["weights"] == pytest.approx(alone["weights"], abs=1e-4)
        assert each["loss"] == pytest.approx(alone["loss"], abs=1e-4)


def test_a_script_for_horovod_alone_divides_the_samples(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HOROVOD)
    done = run([*HOROVODRUN, "-np", "2", sys.executable, "script.py", tmp_path], tmp_path, of_one_thread())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["size"] == 1
    assert sorted(sample for seen in found["seen"] for sample in seen) == list(range(32))


def test_cast_keeps_the_attributes_of_a_models_output() -> None:
    from transformers.modeling_outputs import TokenClassifierOutput

    numbers, tokens = torch.ones(2), torch.arange(2)
    outputs = cast(TokenClassifierOutput(logits=numbers, hidden_states=(tokens,)), torch.float64)
    assert type(outputs) is TokenClassifierOutput
    assert outputs.logits.dtype == outputs["logits"].dtype == torch.float64
    assert outputs.hidden_states[0].dtype == torch.int64
