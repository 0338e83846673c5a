"""Data sets, sharding, augmentation and loading.

Start with `catalog`, which finds a data set by its name, or with `loaders` for a custom training loop. `sets` defines
data sets, also custom ones, and the batch of a step, `sharding` which samples a step gets. `process_pool` serves
commands that process a whole data set.

| package | contents |
|---|---|
| `sources` | data sets: folders of images, ImageNet, digits, custom |
| `packed` | reading and writing packed data sets |
| `pipeline` | from encoded bytes to a batch on the device |
| `augment` | random augmentation, seeded by (seed, epoch, sample) |
"""
