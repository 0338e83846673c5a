"""Not provided: the message says what to use."""

raise ImportError(
    "horovod.spark.lightning: Lockstep has no Spark estimators. Write the DataFrame with DataFrame.write.parquet, and "
    "train by horovod.spark.run, which calls a function that reads these files and uses horovod.torch"
)
