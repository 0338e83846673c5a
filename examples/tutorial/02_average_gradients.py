"""Step 2: manual data parallelism: shard a batch, average the gradients, and compare with the whole batch's gradient.

torchrun --nproc-per-node 2 examples/tutorial/02_average_gradients.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import build_model, load_digits
from torch import Tensor

BATCH = 64


def gradient(images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean loss over these images, flattened to one vector."""
    model = build_model()  # the same weights on every worker
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def say(line: str) -> None:
    """Print a line on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (part[:BATCH] for part in load_digits()[0].tensors)
    whole = gradient(images, labels)
    say(f"the whole batch of {BATCH}: length of its gradient {whole.norm():.4f}")

    # Equal shards: worker r takes the samples r, r + size, r + 2 * size, ...
    own = gradient(images[rank::size], labels[rank::size])
    lengths = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(lengths, own.norm())
    say("the shards alone: " + ", ".join(f"{length:.4f}" for length in lengths))
    mean = own.clone()
    dist.all_reduce(mean)  # the sum over all workers, on every worker
    mean /= size
    say(f"the mean over the shards: {mean.norm():.4f}, equal: {torch.allclose(mean, whole, atol=1e-6)}")

    # Unequal shards: worker 0 takes the first 16 samples, the others share the rest.
    bounds = [0, *(16 + (BATCH - 16) * part // (size - 1) for part in range(size))]
    mine = slice(bounds[rank], bounds[rank + 1])
    own = gradient(images[mine], labels[mine])
    mean = own / size
    dist.all_reduce(mean)
    say(f"16 and 48 samples, plain mean: {mean.norm():.4f}, equal: {torch.allclose(mean, whole, atol=1e-6)}")
    mean = own * (mine.stop - mine.start) / BATCH
    dist.all_reduce(mean)
    say(f"weighted by their samples: {mean.norm():.4f}, equal: {torch.allclose(mean, whole, atol=1e-6)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
