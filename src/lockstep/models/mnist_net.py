import torch.nn as nn


def build(num_classes=10, in_channels=1, w=16, kind="A"):
    def cv(i, o, s=1):
        return [nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

    P = nn.MaxPool2d(2)
    if kind == "A":  # 14x14 main
        return nn.Sequential(
            nn.Conv2d(in_channels, w, 5, 2, 2, bias=False),
            nn.BatchNorm2d(w),
            nn.ReLU(inplace=True),
            *cv(w, 2 * w),
            P,
            *cv(2 * w, 4 * w),
            *cv(4 * w, 4 * w),
            P,
            nn.Flatten(),
            nn.Linear(4 * w * 9, num_classes),
        )
    if kind == "B":  # 3x3, pool
        return nn.Sequential(
            *cv(in_channels, w),
            P,
            *cv(w, 2 * w),
            P,
            *cv(2 * w, 4 * w),
            *cv(4 * w, 4 * w),
            P,
            nn.Flatten(),
            nn.Linear(4 * w * 9, num_classes),
        )
