"""The zoo: what it costs, that it reads the checkpoint files people have, and that it trains in every way we offer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models import registry
from lockstep.models.registry import ZOO

PUBLISHED = {
    "vgg16": (14_728_266, 92.64),
    "resnet18": (11_173_962, 93.02),
    "resnet50": (23_520_842, 93.62),
    "resnet101": (42_512_970, 93.75),
    "regnetx_200mf": (2_321_946, 94.24),
    "regnety_400mf": (5_714_362, 94.29),
    "mobilenetv2": (2_296_922, 94.43),
    "resnext29_32x4d": (4_774_218, 94.73),
    "resnext29_2x64d": (9_128_778, 94.82),
    "simpledla": (15_142_970, 94.89),
    "densenet121": (6_956_298, 95.04),
    "preactresnet18": (11_171_146, 95.11),
    "dpn92": (34_236_634, 95.16),
    "dla": (16_291_386, 95.47),
}
# Of pytorch-cifar's checkpoint files: the number of entries, and the shapes of some. Their linear layers have 10 classes.
LAYOUT: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "vgg16": (
        93,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.0.bias": (64,),
            "features.1.running_mean": (64,),
            "features.3.weight": (64, 64, 3, 3),
            "features.7.weight": (128, 64, 3, 3),
            "features.14.weight": (256, 128, 3, 3),
            "features.24.weight": (512, 256, 3, 3),
            "features.40.weight": (512, 512, 3, 3),
            "features.41.num_batches_tracked": (),
            "classifier.weight": (10, 512),
        },
    ),
    "resnet18": (
        122,
        {
            "conv1.weight": (64, 3, 3, 3),
            "bn1.weight": (64,),
            "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer2.0.shortcut.0.weight": (128, 64, 1, 1),
            "layer2.0.shortcut.1.running_var": (128,),
            "layer4.1.bn2.bias": (512,),
            "linear.weight": (10, 512),
        },
    ),
    "resnet50": (
        320,
        {
            "layer1.0.conv3.weight": (256, 64, 1, 1),
            "layer1.0.shortcut.0.weight": (256, 64, 1, 1),
            "layer2.0.conv2.weight": (128, 128, 3, 3),
            "layer3.5.conv1.weight": (256, 1024, 1, 1),
            "linear.weight": (10, 2048),
        },
    ),
    "resnet101": (626, {"layer3.22.conv1.weight": (256, 1024, 1, 1), "layer4.2.bn3.weight": (2048,)}),
    "regnetx_200mf": (
        254,
        {
            "conv1.weight": (64, 3, 3, 3),
            "layer1.0.conv2.weight": (24, 8, 3, 3),
            "layer1.0.shortcut.0.weight": (24, 64, 1, 1),
            "layer3.3.conv3.weight": (152, 152, 1, 1),
            "layer4.6.bn3.weight": (368,),
            "linear.weight": (10, 368),
        },
    ),
    "regnety_400mf": (
        518,
        {
            "layer1.0.se.se1.weight": (16, 32, 1, 1),
            "layer2.0.se.se1.weight": (8, 64, 1, 1),
            "layer2.0.se.se2.bias": (64,),
            "layer4.11.conv2.weight": (384, 16, 3, 3),
        },
    ),
    "mobilenetv2": (
        344,
        {
            "conv1.weight": (32, 3, 3, 3),
            "layers.0.conv2.weight": (32, 1, 3, 3),
            "layers.0.shortcut.0.weight": (16, 32, 1, 1),
            "layers.1.conv1.weight": (96, 16, 1, 1),
            "layers.16.conv3.weight": (320, 960, 1, 1),
            "conv2.weight": (1280, 320, 1, 1),
            "bn2.weight": (1280,),
            "linear.weight": (10, 1280),
        },
    ),
    "resnext29_32x4d": (
        188,
        {
            "conv1.weight": (64, 3, 1, 1),
            "layer1.0.conv2.weight": (128, 4, 3, 3),
            "layer3.2.conv3.weight": (1024, 512, 1, 1),
            "linear.weight": (10, 1024),
        },
    ),
    "resnext29_2x64d": (188, {"layer1.0.conv2.weight": (128, 64, 3, 3), "layer3.0.shortcut.0.weight": (1024, 512, 1, 1)}),
    "simpledla": (
        242,
        {
            "base.0.weight": (16, 3, 3, 3),
            "layer2.1.bias": (32,),
            "layer3.root.conv.weight": (64, 128, 1, 1),
            "layer3.left_tree.shortcut.0.weight": (64, 32, 1, 1),
            "layer4.right_tree.right_tree.conv2.weight": (128, 128, 3, 3),
            "layer5.left_tree.root.bn.running_mean": (256,),
            "linear.weight": (10, 512),
        },
    ),
    "dla": (
        266,
        {
            "base.1.weight": (16,),
            "layer3.left_node.conv1.weight": (64, 32, 3, 3),
            "layer4.root.conv.weight": (128, 512, 1, 1),
            "layer4.level_1.root.conv.weight": (128, 256, 1, 1),
            "layer4.level_1.left_node.shortcut.0.weight": (128, 64, 1, 1),
            "layer5.prev_root.conv1.weight": (256, 128, 3, 3),
            "layer5.left_node.conv1.weight": (256, 256, 3, 3),
            "layer6.right_node.bn2.weight": (512,),
        },
    ),
    "densenet121": (
        727 - 1,
        {
            "conv1.weight": (64, 3, 3, 3),
            "dense1.0.bn1.weight": (64,),
            "dense1.5.conv1.weight": (128, 224, 1, 1),
            "dense1.5.conv2.weight": (32, 128, 3, 3),
            "trans1.bn.weight": (256,),
            "trans3.conv.weight": (512, 1024, 1, 1),
            "bn.bias": (1024,),
            "linear.weight": (10, 1024),
        },
    ),
    "preactresnet18": (
        0,
        {
            "conv1.weight": (64, 3, 3, 3),
            "layer1.0.bn1.weight": (64,),
            "layer2.0.shortcut.0.weight": (128, 64, 1, 1),
            "layer4.1.conv2.weight": (512, 512, 3, 3),
        },
    ),
    "dpn92": (
        0,
        {
            "bn1.weight": (64,),
            "layer1.0.conv2.weight": (96, 3, 3, 3),
            "layer1.0.conv3.weight": (272, 96, 1, 1),
            "layer1.0.shortcut.0.weight": (272, 64, 1, 1),
            "layer1.1.conv1.weight": (96, 288, 1, 1),
            "layer3.19.conv1.weight": (384, 1504, 1, 1),
            "layer4.2.bn3.weight": (2176,),
            "linear.weight": (10, 2560),
        },
    ),
}
