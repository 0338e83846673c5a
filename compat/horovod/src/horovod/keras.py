"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.keras: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "For Keras there is keras.distribution, or Horovod itself"
)
