"""The process sets of `lockstep.hvd.process_sets`."""

from lockstep.hvd.process_sets import ProcessSet as ProcessSet
from lockstep.hvd.process_sets import add_process_set as add_process_set
from lockstep.hvd.process_sets import global_process_set as global_process_set
from lockstep.hvd.process_sets import process_set_ids as process_set_ids
from lockstep.hvd.process_sets import remove_process_set as remove_process_set
