"""Not provided: raises ImportError with the alternative."""

raise ImportError(
    "horovod.keras: Lockstep provides Horovod's API only for PyTorch (horovod.torch). "
    "For Keras, use keras.distribution or the original Horovod"
)
