import torch.nn as nn


class CBR(nn.Sequential):
    def __init__(s, i, o, k=3, st=1, p=1):
        super().__init__(nn.Conv2d(i, o, k, st, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Res(nn.Module):
    def __init__(s, w):
        super().__init__()
        s.f = nn.Sequential(CBR(w, w), CBR(w, w))

    def forward(s, x):
        return x + s.f(x)


def build(kind="A", num_classes=10, in_channels=3):
    P = lambda: nn.MaxPool2d(2)
    head = lambda w: [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(w, num_classes)]
    b, w = kind[0], [int(v) for v in kind[1:].split("-")]
    if b == "A":  # davidnet-like, stem stride 2
        return nn.Sequential(
            CBR(3, w[0], 4, 2, 1),
            CBR(w[0], w[1]),
            P(),
            CBR(w[1], w[2]),
            Res(w[2]),
            P(),
            CBR(w[2], w[3]),
            *head(w[3]),
        )
    if b == "B":  # + res at 4x4
        return nn.Sequential(
            CBR(3, w[0], 4, 2, 1),
            CBR(w[0], w[1]),
            P(),
            CBR(w[1], w[2]),
            Res(w[2]),
            P(),
            CBR(w[2], w[3]),
            Res(w[3]),
            *head(w[3]),
        )
    if b == "C":  # 3x3 stem at 32, conv-pool
        return nn.Sequential(
            CBR(3, w[0]),
            P(),
            CBR(w[0], w[1]),
            P(),
            CBR(w[1], w[2]),
            Res(w[2]),
            P(),
            CBR(w[2], w[3]),
            *head(w[3]),
        )
    if b == "D":  # res at 16x16 too,
        return nn.Sequential(
            CBR(3, w[0], 4, 2, 1),
            CBR(w[0], w[1]),
            Res(w[1]),
            P(),
            CBR(w[1], w[2]),
            Res(w[2]),
            P(),
            CBR(w[2], w[3]),
            *head(w[3]),
        )
