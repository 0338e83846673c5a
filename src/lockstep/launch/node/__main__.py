"""`python -m lockstep.launch.node`: a host's node process, under its guard."""

import asyncio
import sys

from lockstep.launch.node import node_guard, node_process

if __name__ == "__main__":
    sys.exit(node_guard.guarded(lambda scratch: asyncio.run(node_process.serve(scratch))))
