"""Parse the flags of `horovodrun` and its configuration file; the command line takes precedence over the file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import ConfigError
from lockstep.files.untrusted import MOST_YAML_BYTES, parse_yaml

# Sections of the file whose keys are flags without the section's name as a prefix.
PLAIN_SECTIONS = ("params", "library_options", "elastic")
SPECIAL_KEYS = {
    ("elastic", "timeout"): "elastic_timeout",
    ("autotune", "enabled"): "autotune",
    ("stall_check", "enabled"): "no_stall_check",  # the opposite
    ("logging", "level"): "log_level",
    ("logging", "hide_timestamp"): "log_without_timestamp",
    ("logging", "with_timestamp"): "log_without_timestamp",  # the opposite
}
REFUSED = "not supported; start the workers with its own command"
OPPOSITES = ("stall_check.enabled", "logging.with_timestamp")


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse `horovodrun`'s arguments, after those of --config-file, so that the command line takes precedence.

    Raises:
        ConfigError: An argument is invalid, or the file cannot be read or has an unknown key.
    """
    parser = build_parser()
    flags = parser.parse_args(arguments)
    if flags.config_file:
        flags = parser.parse_args([*arguments_of_file(Path(flags.config_file), parser), *arguments])
    if flags.command[:1] == ["--"]:
        del flags.command[0]
    return flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError in the format of all commands."""
        if found := re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message):
            message = f"{found[1]} {found[2]}"
            action = next(each for each in self._actions if found[1] in each.option_strings)
            if value := re.search(r"value: '(.*)'", found[2]):
                wanted = "a whole number" if action.type is int else "a number"
                message = f"{found[1]} {value[1] or repr('')}: must be {wanted}"
            elif value := re.search(r"choice: '(.*?)'", found[2]):
                *others, last = action.choices or ()
                message = f"{found[1]} {value[1]}: must be {', '.join(others)} or {last}"
            elif "expected" in found[2] and (metavar := value_of(action)):
                message = f"{found[1]} needs a value: {metavar}"
        elif found := re.match(r"unrecognized arguments: ([^\s=]*)", message):
            near = get_close_matches(found[1], self._option_string_actions, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "`horovodrun --help` lists the arguments"
            message = f"{found[1]}: unknown flag; {hint}"
        raise ConfigError(message)


def value_of(action: argparse.Action) -> str:
    """Return the placeholder of a flag's value; "" if it takes none."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return f"{{{','.join(map(str, action.choices))}}}"
    names = action.metavar or ""
    return " ".join(names) if isinstance(names, tuple) else names


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags. A flag that is not given is None or False."""
    parser = _Parser(prog="horovodrun", add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="print the usual flags and exit")
    add("--help-all", action="store_true", help="print all flags and exit")
    add("-np", "--num-proc", type=int, metavar="N", help="number of workers")
    add("-v", "--version", action="store_true", help="print the version and exit")
    add("-cb", "--check-build", action="store_true", help="print the available frameworks and backends and exit")
    add("--verbose", action="store_true", help="print the plan of the job first")
    add("--config-file", metavar="YAML", help="file with flags; the command line takes precedence")
    add("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and DIR/rank.N/stderr")
    prefix = ("-prefix-timestamp", "--prefix-output-with-timestamp", "--prefix-timestamp")
    add(*prefix, dest="prefix_timestamp", action="store_true", help="prefix each line of output with the time")
    add("--start-timeout", type=int, metavar="S", help="seconds for all hosts to connect (default: 120)")
    add("--disable-cache", action="store_true", help="no effect")
    _add_cluster(parser.add_argument_group("hosts and network"))
    _add_tuning(parser.add_argument_group("tuning"))
    _add_elastic(parser.add_argument_group("elastic jobs"))
    _add_watching(parser.add_argument_group("timeline, stalls and log"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run in each worker")
    return parser


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and their numbers of workers")
    add("-hostfile", "--hostfile", metavar="FILE", help="file with one host per line: `host slots=N` or `host:N`")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="SSH port of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="SSH key")
    interfaces = ("--network-interfaces", "--network-interface")
    add(*interfaces, action="append", metavar="A,B", help="network interfaces to use; may be repeated")
    for name, meaning in (("gloo", "no effect"), ("mpi", REFUSED), ("jsrun", REFUSED)):
        add(f"--{name}", dest="controller", action="store_const", const=name, help=meaning)
    add("--mpi-args", metavar="ARGS", help="no effect")
    add("--tcp", action="store_true", default=None, help="disable InfiniBand in NCCL")
    add("--binding-args", metavar="ARGS", help="no effect")
    add("--mpi-threads-disable", action=argparse.BooleanOptionalAction, help="no effect")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--fusion-threshold-mb", type=int, metavar="MB", help="largest size of fused tensors")
    add("--cycle-time-ms", type=float, metavar="MS", help="time to wait for more tensors to fuse")
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
    add("--gloo-timeout-seconds", type=int, metavar="S", help="seconds for Gloo to connect (default: 30)")


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--min-np", "--min-num-proc", type=int, metavar="N", help="fewest workers to continue with")
    add("--max-np", "--max-num-proc", type=int, metavar="N", help="most workers to use")
    add("--slots-per-host", type=int, metavar="N", help="slots of discovered hosts without a number")
    add(
        "--host-discovery-script", metavar="FILE", help="command that prints the current hosts, one host:slots per line"
    )
    add("--elastic-timeout", type=int, metavar="S", help="seconds to wait for enough workers (default: 600)")
    add("--reset-limit", type=int, metavar="N", help="maximum number of resets (default: 100 on several hosts)")
    add(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds until a failed slot is reused, doubled with each failure",
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--timeline-filename", metavar="FILE", help="write a Chrome trace of all collectives")
    add("--timeline-mark-cycles", action=argparse.BooleanOptionalAction, help="mark cycles in the timeline")
    stalls: dict[str, Any] = {"dest": "no_stall_check", "default": None}
    add("--no-stall-check", action="store_true", **stalls, help="do not report stalled tensors")
    add("--stall-check", action="store_false", **stalls, help="report stalled tensors, overriding --config-file")
    add(
        "--stall-check-warning-time-seconds",
        type=int,
        metavar="S",
        help="seconds until a stall is reported (default: 60)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        type=int,
        metavar="S",
        help="seconds until a stall ends the job (default: 0, never)",
    )
    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    add("--log-level", type=str.upper, choices=levels, help="log level")
    times: dict[str, Any] = {"dest": "log_without_timestamp", "default": None}
    add("--log-without-timestamp", "--log-hide-timestamp", action="store_true", **times, help="no effect")
    add("--log-with-timestamp", "--no-log-hide-timestamp", action="store_false", **times, help="no effect")


def arguments_of_file(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a configuration file, as command-line arguments.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or has an unknown key.
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
    arguments: list[str] = []
    for where, name, value in _entries(content or {}):
        if name not in actions or name in ("help", "help_all", "command", "config_file"):
            raise ConfigError(f"--config-file {path}: unknown flag {where}; `horovodrun --help` lists the flags")
        action = actions[name]
        if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
            arguments += _switch(where, action, not value if where in OPPOSITES else value, path, parser)
        else:
            arguments += _arguments(action, value)
    return arguments


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each value's key in the file, its flag's name, and the value."""
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


def _arguments(action: argparse.Action, value: Any) -> list[str]:
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
    """Return the flag without a value, of those with the same destination, that sets it to a key's value.

    Raises:
        ConfigError: No flag does.
    """
    choices = {one.const: _option(one) for one in parser._actions if one.dest == action.dest}
    if isinstance(action.const, bool):
        return [choices[wanted]] if (wanted := action.const is bool(value)) in choices else []
    if value not in choices:
        raise ConfigError(f"--config-file {path}: {where} is {' or '.join(map(str, choices))}, not {value}")
    return [choices[value]]
