"""Write the embedded digits as a folder of images: python examples/digits_folder.py FOLDER SIDE."""

import sys
from pathlib import Path

from torchvision.transforms.functional import to_pil_image

from lockstep.data.sets import MemorySplit
from lockstep.data.sources.digits import load

folder, side = Path(sys.argv[1]), int(sys.argv[2])
data = load()
for split, samples in (("train", data.train), ("val", data.val)):
    assert isinstance(samples, MemorySplit)
    for index, (image, label) in enumerate(zip(samples.images, samples.labels, strict=True)):
        path = folder / split / str(int(label)) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).resize((side, side)).save(path)
