"""single_device.py on several workers: lockstep run -np 2 -- python examples/data_parallel.py"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import lockstep.hvd as hvd
from lockstep.data.sources import digits

hvd.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.backends.cudnn.benchmark = True
    torch.cuda.set_device(hvd.local_rank())

images = digits.load()
train_set, test_set = (data.TensorDataset(part.images / 255, part.labels) for part in (images.train, images.val))
loader = data.DataLoader(train_set, 32, sampler=data.DistributedSampler(train_set, hvd.size(), hvd.rank()))

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss = hvd.allreduce(loss.detach())
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

pixels, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test_set.tensors)
right = (model(pixels).argmax(1) == labels).sum()
right = hvd.allreduce(right, op=hvd.Sum)
if hvd.rank() == 0:
    print(f"{100 * right / len(test_set):.1f} % of {len(test_set)} images right")
    torch.save(model.state_dict(), "digits.pt")
