import torch.nn as nn


def build(num_classes=10, in_channels=1, w=32, gn=True):
    def cv(i, o, s=1):
        return [nn.Conv2d(i, o, 3, s, 1, bias=not gn)] + ([nn.GroupNorm(8, o)] if gn else []) + [nn.ReLU()]

    return nn.Sequential(
        *cv(in_channels, w),
        *cv(w, 2 * w),
        nn.MaxPool2d(2),
        *cv(2 * w, 4 * w),
        nn.Flatten(),
        nn.Linear(4 * w * 16, num_classes),
    )
