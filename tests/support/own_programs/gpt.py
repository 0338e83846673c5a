"""Train a small GPT on random crops of a stream of tokens, with gradient accumulation."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--crops", type=int, default=90)
parser.add_argument("--accumulate", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--block", type=int, default=16)
args = parser.parse_args()


class Crops(Dataset):
    """Crops at random places of the stream; the number of a sample means nothing."""

    def __init__(self):
        places = torch.arange(2000)
        self.tokens = (places * places // 7 + places) % 31

    def __len__(self):
        return args.crops

    def __getitem__(self, index):
        start = int(torch.randint(len(self.tokens) - args.block, ()))
        crop = self.tokens[start : start + args.block + 1]
        return crop[:-1], crop[1:]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        drop = args.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(31, width), nn.Embedding(args.block, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 31, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x):
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(h)))


def main():
    torch.manual_seed(0)
    world = lockstep.connect("cpu")
    crops = Crops()
    train = world.loader(crops, args.batch_size, shuffle=True, accumulate=args.accumulate)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(step / 20))
    run = world.run("runs/own", loader=train, model=model, opt=optimizer, lr=scheduler, checkpoint_steps=4, log_every=1)
    for epoch in run.epochs(args.epochs):
        for number, (x, y) in enumerate(train, start=1):
            completes_step = train.completes_step
            model.require_backward_grad_sync = completes_step
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            run.backward(loss)
            if completes_step:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                print(f"epoch {epoch}, batch {number}: loss {loss.item():.4f}")
                optimizer.step()
                scheduler.step()
                run.step(loss=loss)
                optimizer.zero_grad(set_to_none=True)


main()
