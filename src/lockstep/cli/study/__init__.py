"""`lockstep study`: measure where a job's time goes, with one module per study."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from lockstep.cli import HELP
from lockstep.errors import ConfigError

STUDIES = {
    "scaling": "throughput and time per step on different numbers of workers",
    "predict": "throughput on more workers than were measured",
    "batch": "throughput and memory by batch size, and the largest that fits",
    "collectives": "latency and bandwidth by collective and message size",
    "loading": "images per second of each stage of data loading",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        from lockstep.cli.help import page

        about = "Measure a job. Results are printed and appended to study/STUDY.jsonl."
        more = "`lockstep study STUDY --help` shows the flags of a study."
        print(page("lockstep study STUDY [arguments]", about, {"Studies": STUDIES}, more))
        return 0 if arguments else ConfigError.exit_code
    name, *rest = arguments
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean `lockstep study {near[0]}`?" if near else f"must be one of {', '.join(STUDIES)}"
        raise ConfigError(f"{name}: unknown study; {hint}")
    code: int = import_module(f"lockstep.cli.study.{name}").main(rest)
    return code
