"""Not provided: raises ImportError with the alternative."""

raise ImportError(
    "horovod.spark.keras: Lockstep has no Spark estimators. Write the DataFrame with DataFrame.write.parquet, and "
    "pass horovod.spark.run a training function that reads these files and uses horovod.torch"
)
