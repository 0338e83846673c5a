"""`lockstep study STUDY`: measure where a job's time goes; one file a study."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from lockstep.errors import ConfigError

STUDIES = {
    "scaling": "what more workers bring, and where the time of a step goes",
    "predict": "throughput on more workers than were measured, by a model fitted to `lockstep study scaling`",
    "batch": "throughput and memory by batch size, and the largest that fits",
    "collectives": "latency and bandwidth between workers, by operation and size of message",
    "loading": "images a second of each stage of data loading, against what a model takes",
}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else ConfigError.exit_code
    name, *rest = words
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean `lockstep study {near[0]}`?" if near else f"there are: {', '.join(STUDIES)}"
        raise ConfigError(f"there is no study {name!r}; {hint}")
    code: int = import_module(f"lockstep.cli.study.{name}").main(rest)
    return code


def _help() -> str:
    width = max(map(len, STUDIES))
    rows = "\n".join(f"  {name:{width}}  {about}" for name, about in STUDIES.items())
    return (
        "usage: lockstep study STUDY ...\n\n"
        "Measure where a job's time goes. Each study prints what it found and appends it to study/STUDY.jsonl.\n\n"
        f"{rows}\n\nlockstep study STUDY --help explains a study."
    )
