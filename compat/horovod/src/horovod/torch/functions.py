"""The functions of `lockstep.hvd.ops.functions`."""

from lockstep.hvd.ops.functions import allgather_object as allgather_object
from lockstep.hvd.ops.functions import broadcast_object as broadcast_object
from lockstep.hvd.ops.functions import broadcast_optimizer_state as broadcast_optimizer_state
from lockstep.hvd.ops.functions import broadcast_parameters as broadcast_parameters
