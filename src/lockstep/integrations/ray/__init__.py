"""Horovod's workers as Ray actors.

executor  places the actors, tells them their ranks, and runs functions in them
actor     the worker's process
log       what a worker reports to the callbacks of the program that has started it
"""
