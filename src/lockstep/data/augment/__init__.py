"""Random augmentation, seeded by (seed, epoch, sample): identical for any number of workers.

| module | contents |
|---|---|
| `random_draws` | counter-based random numbers |
| `transforms` | random crops, flips and other geometric changes, erasing, and image sizes that grow during training |
| `policies` | RandAugment and TrivialAugment |
| `mixing` | mixup and cutmix |
"""
