"""Data sets, their sharing out, augmentation and loading.

Start with `catalog`, which finds a data set by its name, or with `loaders` for a training loop of your own. `sets` are
data sets as the rest knows them, `batch` is what a step gets, `sharding` says which samples, and `process_pool` is for
commands that work through a whole data set.

| package | what it is |
|---|---|
| `sources` | where images come from |
| `packed` | the packed form, read and written |
| `pipeline` | from encoded bytes to a batch on the device |
| `augment` | random changes, by (seed, epoch, sample) |
"""
