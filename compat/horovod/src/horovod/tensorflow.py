"""Not provided: raises ImportError with the alternative."""

raise ImportError(
    "horovod.tensorflow: Lockstep provides Horovod's API only for PyTorch (horovod.torch). "
    "For TensorFlow, use tf.distribute.MultiWorkerMirroredStrategy or the original Horovod"
)
