"""Sources of images.

| module | contents |
|---|---|
| `digits` | the embedded data set |
| `torchvision_sets` | MNIST, Fashion-MNIST and CIFAR, downloaded by torchvision |
| `image_folder` | any folder of images |
| `prepare_imagenet` | ImageNet's folder tree from its archives |
"""
