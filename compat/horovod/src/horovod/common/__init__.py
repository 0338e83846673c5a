"""Horovod's modules for all frameworks. The submodules are attributes, as libraries expect."""

from horovod.common import basics, elastic, exceptions, process_sets, util

__all__ = ["basics", "elastic", "exceptions", "process_sets", "util"]
