"""Train a small transformer on lines of text of different lengths: accumulation, an EMA of the weights, warm-up."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6, help="of one micro-batch, over all workers")
parser.add_argument("--accumulate", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--float64", action="store_true")
args = parser.parse_args()
WORDS = [
    "lift",
    "the",
    "heavy",
    "box",
    "and",
    "carry",
    "it",
    "over",
    "the",
    "wet",
    "grass",
    "to",
    "an",
    "old",
    "red",
    "barn",
]
LINES = [" ".join(WORDS[(3 * n + k * k) % 16] for k in range(2 + n % 5)) + "\n" for n in range(101)]
LETTERS = sorted(set("".join(LINES)))
PAD = len(LETTERS)


def encode(line):
    return torch.tensor([LETTERS.index(letter) for letter in line])


def collate(lines):
    return nn.utils.rnn.pad_sequence([encode(line) for line in lines], batch_first=True, padding_value=PAD)


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(PAD + 1, width, padding_idx=PAD)
        self.place = nn.Parameter(torch.randn(64, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, args.dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, PAD)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.block(self.embed(text) + self.place[: text.shape[1]], src_mask=mask, is_causal=True))


def loss_of(model, text):
    """Return the mean over the lines of the mean over a line's letters."""
    losses = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], ignore_index=PAD, reduction="none")
    return (losses.sum(1) / (text[:, 1:] != PAD).sum(1)).mean()


def sample(model):
    text = encode("the ")[None]
    for _ in range(20):
        chances = model(text)[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return "".join(LETTERS[letter] for letter in text[0])


def main():
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    world = lockstep.connect("cpu")
    torch.manual_seed(0)
    sizes = {"global_batch": args.batch_size * args.accumulate, "accumulate": args.accumulate}
    train = world.loader(LINES[:80], **sizes, shuffle=True, collate_fn=collate, num_workers=1)
    val = world.loader(LINES[80:], 4, collate_fn=collate, evaluate=True)
    model = world.prepare(Net())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    steps = args.epochs * math.ceil(len(train) / args.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    states = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler}
    run = world.run("runs/own", loader=train, **states, log_every=1)
    for epoch in run.epochs(args.epochs):
        model.train()
        for text in train:
            loss = loss_of(model, text)
            run.backward(loss)
            if train.completes_step:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ema.update_parameters(model)
                run.step(loss=loss)
        ema.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for text in val:
                total, count = total + loss_of(ema, text) * len(text), count + len(text)
            perplexity = math.exp(world.sum(total) / world.sum(count))
            if world.is_main:
                print(f"epoch {epoch}: perplexity {perplexity:.6f}; {sample(ema)!r}")
        run.record(perplexity=perplexity)
        if perplexity < run.extra.get("best", math.inf):
            run.extra["best"] = perplexity
            run.save(best=True)


if __name__ == "__main__":
    main()
