"""timm's loader over a folder of photographs: timm_pipeline.py FOLDER BATCH PROCESSES PASSES."""

from __future__ import annotations

import sys

from timm.data.dataset import ImageDataset
from timm.data.loader import create_loader
from turns import take_turns

folder, batch, processes, passes = sys.argv[1], *map(int, sys.argv[2:])
loader = create_loader(
    ImageDataset(f"{folder}/train"),  # type: ignore[no-untyped-call]
    input_size=(3, 224, 224),
    batch_size=batch,
    is_training=True,
    use_prefetcher=False,  # normalized in the loader processes, like the other contestants
    color_jitter=None,  # type: ignore[arg-type]
    interpolation="bilinear",
    num_workers=processes,
    persistent_workers=True,
    pin_memory=False,
)
take_turns(lambda: sum(len(labels) for _ in range(passes) for _, labels in loader))
