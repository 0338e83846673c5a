"""`lockstep data`: one file an action, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from lockstep.errors import INTERRUPTED, ConfigError

ACTIONS = {
    "get": "fetch a data set ahead of a job",
    "pack": "pack a folder of images into a few large files, resized if you like",
    "info": "say what a folder or a pack holds",
    "verify": "look for damaged images in a folder or a pack",
    "prepare": "make ImageNet's folders from its official archives",
}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else ConfigError.exit_code
    if words[0] not in ACTIONS:
        near = get_close_matches(words[0], ACTIONS, n=1)
        hint = f"did you mean `lockstep data {near[0]}`?" if near else f"there are {', '.join(ACTIONS)}"
        raise ConfigError(f"there is no action {words[0]!r}; {hint}")
    try:
        code: int = import_module(f"lockstep.cli.data.{words[0]}").main(words[1:])
    except KeyboardInterrupt:
        print(f"lockstep data {words[0]}: stopped; what is done is kept where it can be", file=sys.stderr)
        return INTERRUPTED
    return code


def _help() -> str:
    width = max(map(len, ACTIONS))
    rows = "\n".join(f"  {name:{width}}  {about}" for name, about in ACTIONS.items())
    return f"usage: lockstep data ACTION ...\n\n{rows}\n\nlockstep data ACTION --help explains an action."
