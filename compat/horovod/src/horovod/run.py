"""`horovod.run`, which is both a function and a module, since older scripts import it as a module."""

import sys
from types import ModuleType

from lockstep.launch.controller.run_function import run

__all__ = ["run"]


class _CallableModule(ModuleType):
    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = _CallableModule
