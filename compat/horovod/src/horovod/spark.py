"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.spark: Lockstep provides Horovod's API for PyTorch alone (horovod.torch). "
    "In a Spark job, start a script that uses it with pyspark.ml.torch.distributor.TorchDistributor"
)
