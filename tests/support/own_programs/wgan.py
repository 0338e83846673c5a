"""Train a WGAN with gradient penalty: several critic batches for each of the generator's steps."""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6, help="over all workers")
parser.add_argument("--critics", type=int, default=3, help="critic batches per step of the generator")
parser.add_argument("--float64", action="store_true")
parser.add_argument("--noise-of-samples", action="store_true", help="instead of noise drawn by the loop")
args = parser.parse_args()
LATENT = 4


class Spiral(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        turn = torch.tensor(index / 96 * 9.0, dtype=torch.get_default_dtype())
        return turn / 9 * torch.stack([turn.cos(), turn.sin()]) + 0.02 * torch.randn(2), torch.randn(2, LATENT)


def net(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, outputs)
    )


def penalty(critic, real, fake, noise):
    share = noise[:, 0, :1].sigmoid()  # of the sample, so that the number of workers does not matter
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def main():
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    world = lockstep.connect("cpu")
    torch.manual_seed(0)
    train = world.loader(Spiral(), global_batch=args.batch_size, shuffle=True, drop_last=True, num_workers=1)
    generator, critic = world.prepare(net(LATENT, 2)), world.prepare(net(2, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer_g, 0.9)
    fixed = torch.randn(5, LATENT)  # the same noise for the pictures of all epochs
    states = {"generator": generator, "critic": critic, "optimizer_g": optimizer_g, "optimizer_c": optimizer_c}
    run = world.run("runs/own", loader=train, **states, scheduler=scheduler, log_every=1)
    run.extra.setdefault("batches", 0)
    for epoch in run.epochs(args.epochs):
        loss_c = float("nan")
        for real, of_samples in train:
            noise = of_samples if args.noise_of_samples else torch.randn(len(real), 2, LATENT)
            with torch.no_grad():
                fake = generator(noise[:, 0])
            loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, noise)
            optimizer_c.zero_grad()
            run.backward(loss_c)
            optimizer_c.step()
            run.extra["batches"] += 1
            if run.extra["batches"] % args.critics == 0:
                for parameter in critic.parameters():
                    parameter.requires_grad_(False)
                loss_g = -critic(generator(noise[:, 1])).mean()
                optimizer_g.zero_grad()
                run.backward(loss_g)
                optimizer_g.step()
                for parameter in critic.parameters():
                    parameter.requires_grad_(True)
                run.step(loss=loss_c, generator=loss_g)
        scheduler.step()
        if world.is_main:
            with torch.no_grad():
                print(f"epoch {epoch}: critic {loss_c:.6f}, points {generator(fixed).mean():.6f}")


if __name__ == "__main__":
    main()
