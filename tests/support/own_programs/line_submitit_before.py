"""Train a line on points."""

import submitit
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    submitit.helpers.TorchDistributedEnvironment().export()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        inputs = torch.rand(32, 1)
        loss = nn.functional.mse_loss(model(inputs), 3 * inputs + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.4f}")


executor = submitit.AutoExecutor(folder="logs")
executor.update_parameters(nodes=2, tasks_per_node=4, gpus_per_node=4, timeout_min=60)
executor.submit(train).results()
