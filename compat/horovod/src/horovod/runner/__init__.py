"""Starts a function on several workers; `lockstep.launch.controller.run_function` does the work."""

from lockstep.launch.controller.run_function import run

__all__ = ["run"]
