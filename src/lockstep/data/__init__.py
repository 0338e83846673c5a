"""Data sets, sharding, augmentation and loading.

Start with `catalog`, which finds a data set by its name, or with `loaders` for a custom training loop. `sets` defines
data sets, also custom ones, and the batch of a step, `sharding` which samples a step gets. `readers` turn lists of
sample numbers into batches, from memory or, by `stream_reader`, in `loader_processes`; `decode` and `device_decode`
read images on CPU and GPU. `transforms` and `auto_augment` augment images, by `random_draws` seeded by (seed, epoch,
sample). `pack_writer` makes packed data sets, for file systems that are slow with many small files. `inspection`
gathers facts about a data set and checks it, with `parallel_map`. `sources` has folders of images, packed ones,
ImageNet and digits.
"""
