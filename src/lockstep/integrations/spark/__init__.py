"""Horovod's workers in Spark tasks.

run          what a program calls, as horovod.spark has it
task_server  the driver's side: the tasks that have connected, and the workers that it starts in them
task         the task's side
wire         what the two tell each other
"""
