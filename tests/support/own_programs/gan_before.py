"""Train a GAN: a generator and a discriminator, each with its optimizer."""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6)
parser.add_argument("--noise-of-samples", action="store_true", help="instead of noise drawn on the device")
parser.add_argument("--float64", action="store_true")
args = parser.parse_args()
LATENT = 4


class Ring(Dataset):
    """Points on a circle, with noise for the generator."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        angle = torch.tensor(index / 96 * 6.283)
        return torch.stack([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2), torch.randn(LATENT)


def make_net(*widths):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])


def loss_of(logits, is_real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    ring = Ring()
    sampler = torch.utils.data.DistributedSampler(ring, shuffle=True)
    train = torch.utils.data.DataLoader(ring, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    nets = make_net(LATENT, 16, 2), make_net(2, 16, 1)
    generator, critic = (DistributedDataParallel(net) for net in nets)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}, learning rate {optimizer_g.param_groups[0]['lr']:.2g}")
        for real, of_samples in train:
            noise = of_samples if args.noise_of_samples else torch.randn(len(real), LATENT, device=device)
            fake = generator(noise)
            optimizer_d.zero_grad()
            loss_real = loss_of(critic(real), True)
            loss_real.backward()
            loss_fake = loss_of(critic(fake.detach()), False)
            loss_fake.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = loss_of(critic(fake), True)
            loss_g.backward()
            optimizer_g.step()
    dist.destroy_process_group()


main()
