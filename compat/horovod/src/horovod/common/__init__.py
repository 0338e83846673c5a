"""What Horovod's frameworks have in common. The submodules are attributes, as libraries expect."""

from horovod.common import elastic, exceptions, process_sets, util

__all__ = ["elastic", "exceptions", "process_sets", "util"]
