"""Horovod's workers in Spark tasks.

run          horovod.spark's functions, the public API
task_server  the driver's side: the connected tasks and their workers
task         the task's side
messages     the messages between driver and tasks
"""
