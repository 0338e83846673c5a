"""Horovod's workers as Ray actors.

executor        what a program calls, as horovod.ray has it
fixed_actors    a number of workers that stays; places the actors and tells them their ranks
elastic_actors  workers that come and go with the cluster's nodes
actor           the worker's process
coordinator     places of workers that Ray's own HorovodTrainer starts
log             what a worker reports to the callbacks of the program that has started it
"""
