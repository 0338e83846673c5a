"""The states of `lockstep.hvd.elastic.state`."""

from lockstep.hvd.elastic.state import HostUpdateResult as HostUpdateResult
from lockstep.hvd.elastic.state import ModelStateHandler as ModelStateHandler
from lockstep.hvd.elastic.state import ObjectState as ObjectState
from lockstep.hvd.elastic.state import OptimizerStateHandler as OptimizerStateHandler
from lockstep.hvd.elastic.state import SamplerStateHandler as SamplerStateHandler
from lockstep.hvd.elastic.state import State as State
from lockstep.hvd.elastic.state import StateDictHandler as StateDictHandler
from lockstep.hvd.elastic.state import StateHandler as StateHandler
from lockstep.hvd.elastic.state import TorchState as TorchState
from lockstep.hvd.elastic.state import get_handler_registry as get_handler_registry
from lockstep.hvd.elastic.state import set_handler_registry as set_handler_registry
