"""Horovod's modules for all launchers."""
