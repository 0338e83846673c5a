"""The flags of `horovodrun`, and its configuration file, whose values are flags under the command line's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files.untrusted import MOST_YAML_BYTES, parse_yaml

# Sections of the file whose keys are flags without the section's name before them.
PLAIN_SECTIONS = ("params", "library_options", "elastic")
SPECIAL_KEYS = {
    ("elastic", "timeout"): "elastic_timeout",
    ("autotune", "enabled"): "autotune",
    ("stall_check", "enabled"): "no_stall_check",  # the opposite
    ("logging", "level"): "log_level",
    ("logging", "hide_timestamp"): "log_without_timestamp",
    ("logging", "with_timestamp"): "log_without_timestamp",  # the opposite
}
REFUSED = "refused; start the workers by its own command instead"
OPPOSITES = ("stall_check.enabled", "logging.with_timestamp")


def parse_flags(words: Sequence[str]) -> argparse.Namespace:
    """Read `horovodrun`'s words, with those of --config-file before them, so that the command line wins.

    Raises:
        ConfigError: The file cannot be read, or has a key that is no flag.
    """
    parser = build_parser()
    flags = parser.parse_args(words)
    if flags.config_file:
        flags = parser.parse_args([*words_of_file(Path(flags.config_file), parser), *words])
    if flags.command[:1] == ["--"]:
        del flags.command[0]
    return flags


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags; a flag that is not given is None or False."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        usage="horovodrun -np N [flags] command ...",
        description="Start a command on N workers, for scripts of Horovod's API.",
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="number of workers")
    add("-v", "--version", action="store_true", help="print the version and stop")
    add("-cb", "--check-build", action="store_true", help="print what this installation offers and stop")
    add("--verbose", action="store_true", help="print the plan of the job before it starts")
    add("--config-file", metavar="YAML", help="flags from a file; the command line's win")
    add("--output-filename", metavar="DIR", help="write DIR/rank.N/stdout and DIR/rank.N/stderr as well")
    prefix = ("-prefix-timestamp", "--prefix-output-with-timestamp", "--prefix-timestamp")
    add(*prefix, dest="prefix_timestamp", action="store_true", help="put the time before each line of output")
    add("--start-timeout", type=int, metavar="S", help="seconds in which all hosts must have answered (120)")
    add("--disable-cache", action="store_true", help="no effect: nothing is cached")
    _add_cluster(parser.add_argument_group("hosts and network"))
    _add_tuning(parser.add_argument_group("tuning"))
    _add_elastic(parser.add_argument_group("elastic jobs"))
    _add_watching(parser.add_argument_group("timeline, stalls and log"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each worker runs")
    return parser


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and their numbers of workers")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same, in lines `host slots=N`")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="of SSH on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the key for SSH")
    interfaces = ("--network-interfaces", "--network-interface")
    add(*interfaces, action="append", metavar="A,B", help="the only interfaces to use between hosts; may be repeated")
    for name, meaning in (("gloo", "what is used in any case"), ("mpi", REFUSED), ("jsrun", REFUSED)):
        add(f"--{name}", dest="controller", action="store_const", const=name, help=meaning)
    add("--mpi-args", metavar="ARGS", help="no effect")
    add("--tcp", action="store_true", default=None, help="let NCCL use no InfiniBand")
    add("--binding-args", metavar="ARGS", help="no effect")
    add("--mpi-threads-disable", action=argparse.BooleanOptionalAction, help="no effect")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--fusion-threshold-mb", type=int, metavar="MB", help="fuse tensors up to this size")
    add("--cycle-time-ms", type=float, metavar="MS", help="how long a round of the engine waits for more tensors")
    add("--cache-capacity", type=int, metavar="N", help="no effect")
    add("--hierarchical-allreduce", action=argparse.BooleanOptionalAction, help="no effect")
    add("--hierarchical-allgather", action=argparse.BooleanOptionalAction, help="no effect")
    add("--torus-allreduce", action=argparse.BooleanOptionalAction, help="no effect")
    add("--autotune", action=argparse.BooleanOptionalAction, help="no effect")
    add("--autotune-log-file", metavar="FILE", help="no effect")
    add("--autotune-warmup-samples", type=int, metavar="N", help="no effect")
    add("--autotune-steps-per-sample", type=int, metavar="N", help="no effect")
    add("--autotune-bayes-opt-max-samples", type=int, metavar="N", help="no effect")
    add("--autotune-gaussian-process-noise", type=float, metavar="X", help="no effect")
    add("--num-nccl-streams", type=int, metavar="N", help="no effect")
    add("--thread-affinity", metavar="CORES", help="no effect")
    add("--gloo-timeout-seconds", type=int, metavar="S", help="seconds in which Gloo must have connected (30)")


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--min-np", "--min-num-proc", type=int, metavar="N", help="go on with at least N workers")
    add("--max-np", "--max-num-proc", type=int, metavar="N", help="use at most N workers")
    add("--slots-per-host", type=int, metavar="N", help="slots of a discovered host without a number")
    add("--host-discovery-script", metavar="FILE", help="prints lines `host:slots`; asked every second")
    add("--elastic-timeout", type=int, metavar="S", help="seconds to wait for enough workers (600)")
    add("--reset-limit", type=int, metavar="N", help="let workers meet anew N times at most (100 over several hosts)")
    add(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds until a failed worker's slot is used again; they double with each failure",
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--timeline-filename", metavar="FILE", help="write a Chrome trace of all collectives")
    add("--timeline-mark-cycles", action=argparse.BooleanOptionalAction, help="mark the engine's rounds in it")
    stalls: dict[str, Any] = {"dest": "no_stall_check", "default": None}
    add("--no-stall-check", action="store_true", **stalls, help="do not report tensors that wait for workers")
    add("--stall-check", action="store_false", **stalls, help="report them, also where the configuration file says no")
    add("--stall-check-warning-time-seconds", type=int, metavar="S", help="report after this time (60)")
    add("--stall-check-shutdown-time-seconds", type=int, metavar="S", help="end the job after this time (0: never)")
    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    add("--log-level", type=str.upper, choices=levels, help="what the engine says")
    times: dict[str, Any] = {"dest": "log_without_timestamp", "default": None}
    add("--log-without-timestamp", "--log-hide-timestamp", action="store_true", **times, help="no effect")
    add("--log-with-timestamp", "--no-log-hide-timestamp", action="store_false", **times, help="no effect")


def words_of_file(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a configuration file holds, as words.

    Raises:
        ConfigError: It cannot be read, is no mapping, or has a key that is no flag.
    """
    try:
        with path.open("rb") as file:
            content = parse_yaml(file.read(MOST_YAML_BYTES + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"--config-file {path}: expected sections or flags with their values")
    actions = {action.dest: action for action in reversed(parser._actions)}
    actions |= {_name(option): action for action in parser._actions for option in action.option_strings}
    words: list[str] = []
    for where, name, value in _entries(content or {}):
        if name not in actions or name in ("help", "command", "config_file"):
            raise ConfigError(f"--config-file {path}: there is no {where}; `horovodrun --help` lists the flags")
        action = actions[name]
        if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
            words += _switch(where, action, not value if where in OPPOSITES else value, path, parser)
        else:
            words += _words(action, value)
    return words


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each value, with its place in the file and its flag's name."""
    for section, values in content.items():
        if not isinstance(values, dict):
            yield section, _name(section), values
            continue
        for key, value in values.items():
            key_name = _name(key)
            own = f"{_name(section)}_{key_name}"
            name = SPECIAL_KEYS.get((_name(section), key_name), key_name if section in PLAIN_SECTIONS else own)
            yield f"{section}.{key}", name, value


def _name(text: Any) -> str:
    return str(text).lstrip("-").replace("-", "_")


def _words(action: argparse.Action, value: Any) -> list[str]:
    option = _option(action)
    if action.nargs == 0:
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if action.nargs is not None:
        return [option, *map(str, values)]
    return [f"{option}={each}" for each in values]


def _option(action: argparse.Action) -> str:
    return next(option for option in action.option_strings if option.startswith("--"))


def _switch(where: str, action: argparse.Action, value: Any, path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The flag without a value that stands for a key's value: of those that set the same thing, the one that fits.

    Raises:
        ConfigError: None does.
    """
    choices = {one.const: _option(one) for one in parser._actions if one.dest == action.dest}
    if isinstance(action.const, bool):
        return [choices[wanted]] if (wanted := action.const is bool(value)) in choices else []
    if value not in choices:
        raise ConfigError(f"--config-file {path}: {where} is {' or '.join(map(str, choices))}, not {value}")
    return [choices[value]]
