"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.mxnet: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "MXNet was retired in 2023; only Horovod itself trains with it"
)
