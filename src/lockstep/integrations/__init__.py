"""Integrations with other frameworks. Each is a separate module, imported only when used.

ray        horovod.ray's executors, whose workers are Ray actors
spark      horovod.spark's `run`, whose workers run in Spark tasks
spark_task the part of it that runs in a task
lightning  a strategy for Lightning's Trainer
seats      the workers' environment variables, for ray and spark
"""
