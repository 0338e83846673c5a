"""Sources of images.

| module | contents |
|---|---|
| `digits` | the embedded data set |
| `torchvision_sets` | MNIST, Fashion-MNIST and CIFAR, downloaded by torchvision |
| `image_folder` | any folder of images |
| `pack_reader` | packed data sets, which `lockstep.data.pack_writer` makes |
| `prepare_imagenet` | ImageNet's folder tree from its archives |
"""
