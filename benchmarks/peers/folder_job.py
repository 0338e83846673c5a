"""What the hand-written loops over a folder of images share: arguments, images, network and evaluation."""

import argparse

import torch
from torch import nn
from torchvision import datasets, models, transforms


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--loaders", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=20)
    return parser.parse_args()


def image_sets(flags: argparse.Namespace) -> tuple[datasets.ImageFolder, datasets.ImageFolder]:
    end = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    change = [transforms.RandomResizedCrop(flags.side), transforms.RandomHorizontalFlip()]
    center = [transforms.Resize(flags.side * 256 // 224), transforms.CenterCrop(flags.side)]
    train_set = datasets.ImageFolder(f"{flags.folder}/train", transforms.Compose([*change, *end]))
    return train_set, datasets.ImageFolder(f"{flags.folder}/val", transforms.Compose([*center, *end]))


def network(classes: int) -> nn.Module:
    return models.resnet18(num_classes=classes)


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


@torch.inference_mode()
def counts_of(model: nn.Module, batches: torch.utils.data.DataLoader) -> torch.Tensor:
    """Return the numbers of correct and of all images of this worker."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    for images, labels in batches:
        counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    return counts
