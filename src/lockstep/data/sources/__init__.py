"""Where images come from.

`digits` is embedded; `torchvision_sets` are MNIST, Fashion-MNIST and CIFAR, which torchvision fetches; `image_folder`
(listed by `folder_listing`) is any folder of images, `user_dataset` what the user's function returns, `synthetic`
random images. `prepare_imagenet` makes folders of ImageNet's archives, `verify` decodes everything once,
and `describe` says what a data set is.
"""
