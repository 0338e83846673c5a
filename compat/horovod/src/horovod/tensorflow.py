"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.tensorflow: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "For TensorFlow there is tf.distribute.MultiWorkerMirroredStrategy, or Horovod itself"
)
