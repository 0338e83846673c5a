"""Train a line on points."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
points = torch.linspace(-1, 1, 512).unsqueeze(1)
data = TensorDataset(points, 3 * points + 1)

world = lockstep.connect()
net = nn.Linear(1, 1)
model = world.prepare(net)
loader = world.loader(data, global_batch=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(5):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if world.is_main:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
if world.is_main:
    torch.save(net.state_dict(), "line.pt")
