"""`lockstep data`, with one module per action, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from lockstep.cli import HELP
from lockstep.errors import INTERRUPTED, ConfigError

ACTIONS = {
    "get": "download a data set before a job needs it",
    "pack": "pack a folder of images into a few large files",
    "info": "describe a folder of images or a pack",
    "verify": "find damaged images in a folder or a pack",
    "prepare": "extract ImageNet's official archives",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        from lockstep.cli.help import page

        more = "`lockstep data ACTION --help` shows the flags of an action."
        print(page("lockstep data ACTION [arguments]", "", {"Actions": ACTIONS}, more))
        return 0 if arguments else ConfigError.exit_code
    if arguments[0] not in ACTIONS:
        near = get_close_matches(arguments[0], ACTIONS, n=1)
        hint = f"did you mean `lockstep data {near[0]}`?" if near else f"must be one of {', '.join(ACTIONS)}"
        raise ConfigError(f"{arguments[0]}: unknown action; {hint}")
    try:
        code: int = import_module(f"lockstep.cli.data.{arguments[0]}").main(arguments[1:])
    except KeyboardInterrupt:
        print(f"lockstep data {arguments[0]}: interrupted; completed work is kept where possible", file=sys.stderr)
        return INTERRUPTED
    return code
