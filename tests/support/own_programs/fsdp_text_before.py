"""Train a text classifier whose parameters are sharded over the workers (FSDP2)."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()


class Sentences(Dataset):
    """Sequences of word numbers; the class is whether the first word is repeated."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words = torch.randint(2, 40, (12,))
        if index % 2:
            words[int(torch.randint(1, 12, ()))] = words[0]
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sentences = Sentences()
    sampler = torch.utils.data.DistributedSampler(sentences, shuffle=True)
    train = torch.utils.data.DataLoader(sentences, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.epochs * len(train))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}, learning rate {optimizer.param_groups[0]['lr']:.2g}")
        for batch in train:
            loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    dist.destroy_process_group()


main()
