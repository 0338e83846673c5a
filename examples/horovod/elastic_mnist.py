"""MNIST with Horovod's elastic API: training continues while workers fail, leave and join.

    horovodrun -np 2 --min-np 1 python examples/horovod/elastic_mnist.py --epochs 20
    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/horovod/elastic_mnist.py

If you kill a worker, the others return to the last commit, and a new worker replaces it. On several hosts
(-H a:2,b:2 --min-np 2), all workers restart from the last commit on the remaining hosts. With a launcher that does not
replace workers, such as torchrun, it trains like mnist.py, whose data and network it imports.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from mnist import Net, evaluate, load_data
from torch.utils.data import DataLoader


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST with Horovod's elastic API.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder with MNIST's four IDX files, plain or .gz (default: digits)")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--batches-per-commit", type=int, default=5, help="steps between commits")
    add("--lr", type=float, default=0.02, help="learning rate for one worker; scaled by their number")
    add("--seed", type=int, default=42)
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    train_set, test_set = load_data(args.data_dir)
    model = Net(side=train_set[0][0].shape[-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run  # synchronizes the state on all workers, including new ones, then calls the function
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            model.train()
            for number, (images, labels) in enumerate(DataLoader(train_set, args.batch_size, sampler=state.sampler)):
                optimizer.zero_grad()
                F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
                optimizer.step()
                state.sampler.record_batch(number, args.batch_size)
                if (number + 1) % args.batches_per_commit == 0:
                    state.commit()  # a failure restores this state
            loss, accuracy = evaluate(model, test_set, device)
            state.epoch += 1
            if hvd.rank() == 0:
                print(
                    f"epoch {state.epoch} of {args.epochs}: loss {loss:.4f}, {accuracy:.2f} % right, "
                    f"{hvd.size()} workers",
                    flush=True,
                )
            state.sampler.set_epoch(state.epoch)  # at the end of the epoch: a resumed epoch must not restart
            state.commit()

    def rescale() -> None:
        """Scale the learning rate by the new number of workers."""
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([rescale])
    train(state)


if __name__ == "__main__":
    main()
