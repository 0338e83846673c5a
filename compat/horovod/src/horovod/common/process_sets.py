"""The process sets of `lockstep.hvd.process_sets`."""

from lockstep.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_ids,
    remove_process_set,
)

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "process_set_ids", "remove_process_set"]
