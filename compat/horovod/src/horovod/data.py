"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.data: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "To load data beside the training, give torch.utils.data.DataLoader num_workers and persistent_workers"
)
