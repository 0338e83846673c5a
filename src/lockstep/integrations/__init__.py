"""The old path of `lockstep.lightning`."""
