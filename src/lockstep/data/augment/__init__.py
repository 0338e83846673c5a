"""Random augmentation, seeded by (seed, epoch, sample): identical for any number of workers.

| module | contents |
|---|---|
| `random_draws` | counter-based random numbers |
| `crop` | random resized crops |
| `geometric` | shift, flip, rotation, zoom, shear and cutout |
| `rand_augment`, `trivial_augment` | random choices among `operations` |
| `random_erasing` | blanked rectangles |
| `mixing` | mixup and cutmix |
| `progressive` | image sizes that grow during training |
"""
