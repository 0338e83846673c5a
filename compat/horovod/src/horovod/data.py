"""Not provided: raises ImportError with the alternative."""

raise ImportError(
    "horovod.data: Lockstep provides Horovod's API only for PyTorch (horovod.torch). "
    "To load data in background processes, use torch.utils.data.DataLoader with num_workers and persistent_workers"
)
