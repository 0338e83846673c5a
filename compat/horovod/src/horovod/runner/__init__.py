"""Runs a function on several workers; implemented by `lockstep.launch.controller.run_function`."""

from lockstep.launch.controller.run_function import run

__all__ = ["run"]
