"""Starts a function on several workers; `lockstep.launch.function` does the work."""

from lockstep.launch.function import run

__all__ = ["run"]
