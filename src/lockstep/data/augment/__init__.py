"""Random changes of images, each drawn by (seed, epoch, sample): the same for any number of workers.

`random_draws` draws; `crop` chooses the part of an image that is decoded, `geometric` shifts, mirrors, turns and cuts
out, `rand_augment` and `trivial_augment` choose among `operations`, `random_erasing` blanks rectangles, `mixing` is
MixUp and CutMix, and `progressive` changes the image size over a training.
"""
