"""The embedded data set: UCI optical handwritten digits, 1,797 gray images of 8 x 8 pixels.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, CC BY 4.0. This is the repository's test file, which scikit-learn includes, too. The
split is fixed: the first 1,437 images in file order for training, the last 360 for testing (mostly by other writers).
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from lockstep.data.sets import ImageData, InputSpec, MemorySplit

TRAIN_SAMPLES = 1437
LEVELS = 16  # each pixel counts ink, 0 to 16, in a 4 x 4 block of the scanned digit


def load() -> ImageData:
    """Load the digits from the package, with pixels scaled to 0 to 255."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images = torch.from_numpy(np.round(archive["images"] * (255 / LEVELS)).astype(np.uint8)).unsqueeze(1)
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
    return ImageData(
        name="digits",
        classes=tuple("0123456789"),
        train=MemorySplit(images[:TRAIN_SAMPLES], labels[:TRAIN_SAMPLES]),
        val=MemorySplit(images[TRAIN_SAMPLES:], labels[TRAIN_SAMPLES:]),
        input=InputSpec(channels=1, height=8, width=8, mean=(0.305,), std=(0.376,)),
    )
