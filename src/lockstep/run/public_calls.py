"""The function that the script has called on each worker: workers that meet in different ones are an error.

Their collectives would mix values, or end the process. So each call's first one has a header with a code of the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from zlib import crc32

from lockstep.errors import ConfigError
from lockstep.script_check.fingerprints import line_of_script
from lockstep.world.world import World

STEP = "TrainingRun.step"  # its collective ends when the next batch is read
WAIT_SECONDS, POLL_SECONDS = 5.0, 0.05  # for the line of the other call, whose worker may wait for this one


def header(call: str, *numbers: int) -> list[int]:
    """Return numbers of which all workers take the maximum, behind two that show whether their calls differ."""
    code = crc32(call.encode())
    return [code, -code, *numbers]


def check_call(world: World, call: str, highest: Sequence[int]) -> Sequence[int]:
    """Return the numbers of the maximum of the workers' headers; raise ConfigError on all if the calls differ."""
    codes = highest[0], -highest[1]
    if codes[0] == codes[1]:
        return highest[2:]
    store, until = world.store(), time.monotonic() + WAIT_SECONDS
    store.set(f"call/{crc32(call.encode())}", f"worker {world.rank} in {call} ({line_of_script()})")
    while not store.check([f"call/{code}" for code in codes]) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    found = [store.get(f"call/{code}").decode() if store.check([f"call/{code}"]) else "others not" for code in codes]
    raise ConfigError(f"the workers are in different calls, {' and '.join(found)}: make each call on all workers")
