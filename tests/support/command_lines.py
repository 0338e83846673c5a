"""Check the arguments of Lockstep's commands in blocks that cannot run here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any
from unittest.mock import patch

from lockstep import cli
from lockstep.cli import COMMANDS, horovodrun
from lockstep.cli import parse as parsing
from lockstep.errors import ConfigError

OURS = ("lockstep", "horovodrun")


class _TakenError(Exception):
    """The arguments were parsed; raised to stop before the command runs."""


def ours(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield name and arguments of each Lockstep command in shell text, including those started by other commands."""
    joined = re.sub(r"\\\n\s*", " ", text)
    quoted: list[str] = []  # may contain what separates commands

    def hide(found: re.Match[str]) -> str:
        quoted.append(found[0])
        return f"\0{len(quoted) - 1}\0"

    hidden = re.sub(r"'[^']*'|\"[^\"]*\"", hide, "\n".join(map(_without_comment, joined.splitlines())))
    for part in re.split(r"\n|&&|;|(?<!\|)\|(?!\|)|\$\(|\)", hidden):
        words = _without_redirections(shlex.split(re.sub(r"\0(\d+)\0", lambda found: quoted[int(found[1])], part)))
        for index, word in enumerate(words):
            if Path(word).name in OURS and (index == 0 or words[index - 1] != "-p"):
                rest = words[index + 1 :]
                yield Path(word).name, rest
                job = rest[rest.index("--") + 1 :] if rest[:1] == ["study"] and "--" in rest else []
                if job and job[0] != "python":  # arguments that the study parses later
                    yield "lockstep", ["train", *job]


def refusal(name: str, words: Sequence[str], printed: Any) -> str | None:
    """Return the command's error for these arguments, or None; `printed` returns the output since the last call."""
    try:
        if name == "horovodrun":
            horovodrun.parse_flags(words)
        else:
            _call(words)
    except _TakenError:
        return None
    except SystemExit as end:
        return None if end.code in (0, None) else printed()
    except ConfigError as error:
        return str(error)
    return None


def _call(words: Sequence[str]) -> None:
    """Run `lockstep WORDS` until its arguments are parsed."""
    if not words or words[0] not in COMMANDS:
        raise SystemExit(cli.main(words))
    taken = [
        patch(f"{module.name}.{function}", _taking(getattr(parsing, function)))
        for module in walk_packages(cli.__path__, "lockstep.cli.")
        for function in ("parse", "parse_train")
        if module.name != parsing.__name__ and hasattr(import_module(module.name), function)
    ]
    for one in taken:
        one.start()
    try:
        import_module(f"lockstep.cli.{words[0]}").main(words[1:])
    finally:
        for one in taken:
            one.stop()


def _taking(function: Any) -> Any:
    def take(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        raise _TakenError

    return take


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _without_redirections(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for word in words:
        if re.fullmatch(r"\d?>>?(&\d)?|<|&", word):
            break
        kept.append(word)
    return kept
