"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.ray: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "In a Ray job, start a function that uses it with ray.train.torch.TorchTrainer"
)
