"""Horovod's workers as Ray actors.

executor        horovod.ray's executors, the public API
fixed_actors    a fixed number of workers: creates the actors and assigns their ranks
elastic_actors  workers that follow the cluster's nodes
actor           the worker's process
coordinator     rank info for workers that Ray's HorovodTrainer starts
log             reports from workers to the callbacks of the calling program
"""
