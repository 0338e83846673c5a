"""Not provided: raises ImportError with the alternative."""

raise ImportError(
    "horovod.mxnet: Lockstep provides Horovod's API only for PyTorch (horovod.torch). "
    "For MXNet, which was retired in 2023, use the original Horovod"
)
