"""Train a small network on the embedded digits, on one device: python examples/single_device.py"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

from lockstep.data.sources import digits

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.backends.cudnn.benchmark = True

images = digits.load()
train_set, test_set = (data.TensorDataset(part.images / 255, part.labels) for part in (images.train, images.val))
loader = data.DataLoader(train_set, 32, shuffle=True)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

pixels, labels = (tensor.to(device) for tensor in test_set.tensors)
right = (model(pixels).argmax(1) == labels).sum()
print(f"{100 * right / len(test_set):.1f} % of {len(test_set)} images right")
torch.save(model.state_dict(), "digits.pt")
