"""Explain in one line why a host failed to start its part of a job, and how to fix that."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from lockstep.errors import LockstepError
from lockstep.launch.plan.job_plan import NodePlan
from lockstep.world.rendezvous import load_here

T = TypeVar("T")
# ssh's messages and their meanings.
SSH_TROUBLES = {
    "Permission denied": "refuses this user's key; copy it with `ssh-copy-id {host}`",
    "Host key verification failed": "has an unknown or changed host key; run `ssh {host}` once",
    "Could not resolve hostname": "is an unknown host name; check it, or ~/.ssh/config",
    "Name or service not known": "is an unknown host name; check it, or ~/.ssh/config",
    "Connection refused": "has no SSH server at that port; check that it is up, and the port (--ssh-option='-p N')",
    "Connection timed out": "does not answer; check that it is up, and check its firewall",
    "No route to host": "is unreachable; check that it is up and on this network",
    "Network is unreachable": "is unreachable; check that it is up and on this network",
    "Too many authentication failures": "refuses this user's keys; choose the right one: --ssh-option='-i FILE'",
}
NO_MODULE = re.compile(r"No module named '?([\w.]+)")
TELLING = re.compile(r"error|cannot|can't|fail|fatal|denied|invalid|no such|not found|unable", re.IGNORECASE)
NO_PYTHON = ("No such file or directory", "not found", "Permission denied")


class StartError(LockstepError):
    """The job could not be started. Exit code 3.

    Args:
        hosts: Those that prevented the start, if they are known.
    """

    exit_code = 3

    def __init__(self, text: str, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.hosts = hosts


class ConsequenceError(StartError):
    """A host could not go on because of another host."""


def killed(code: int) -> str:
    """Return which signal killed a process, from its exit code or a shell's; "" if none did."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return ""
    hint = " (possibly out of memory)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def disagreement(hosts: Sequence[str], versions: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each difference between a host's versions and the first host's; "" if there is none."""
    lines = []
    for host, own in zip(hosts[1:], versions[1:], strict=True):
        for name, expected in versions[0].items():
            if own.get(name) != expected:
                lines.append(
                    f"{host} has {name} {own.get(name, 'none')}, but {hosts[0]} has {expected}: install the same on "
                    f"both, or choose a Python that has it with --python"
                )
    return "\n".join(lines)


def too_late(nodes: Sequence[NodePlan], what: str, seconds: float) -> str:
    """Return the message that nodes did not do something in time, with the likely causes."""
    here = f" ({load_here()})" if any(node.is_here for node in nodes) else ""
    where = "" if all(node.is_here for node in nodes) else "the network or "
    return (
        f"{', '.join(node.host for node in nodes)} did not {what} within {seconds:g} s: the machine is "
        f"overloaded{here}, or {where}the file system is slow; to wait longer, use --start-timeout S"
    )


def why_not_started(node: NodePlan, code: int, stderr: str) -> str:
    """Explain why a node process exited before it answered.

    Args:
        code: Its exit code, or that of ssh or a similar program.
        stderr: The end of its standard error.
    """
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), f"exit code {code}")
    program = "".join(node.start[:1])
    if how := killed(code):
        return f"the node process on {node.host} {how} during the start"
    if program == "ssh" and code == 255 and not stderr.strip():
        return (
            f"the SSH connection to {node.host} closed without an error: the node process there was killed during the "
            f"start, possibly because memory ran out"
        )
    python = next((part for part in reversed(node.start) if "python" in part.lower()), "python").split()
    path = next((part for part in python if "python" in part.lower()), "python")
    if program == "ssh" and code == 255:
        for message, meaning in SSH_TROUBLES.items():
            if message in stderr:
                return f"{node.host} {meaning.format(host=node.host)}"
        return f"{node.host} cannot be reached by SSH: {last}"
    if node.in_container:
        return f"{node.host}: {_why_no_container(last, stderr)}"
    if "Unknown option: -P" in stderr.splitlines():
        return f"{node.host} has a {path} older than 3.11: choose another Python with --python"
    if missing := NO_MODULE.search(stderr):
        fix = "install lockstep-torch there, or choose another Python with --python"
        return f"{node.host} lacks the package {missing[1]} in {path}: {fix}"
    if code in (126, 127) or any(message in last for message in NO_PYTHON):
        return f"{node.host} has no {path}: install it there, or choose another Python with --python"
    return f"{node.host} failed to start: {last}"


def _why_no_container(last: str, stderr: str) -> str:
    if "Unknown option: -P" in stderr.splitlines():
        return "the image's Python is older than 3.11: choose another with --python, or another image"
    if missing := NO_MODULE.search(stderr):
        return (
            f"the image's Python has no package {missing[1]}: install it in the image, or choose another with --python"
        )
    telling = [line.strip() for line in stderr.splitlines() if TELLING.search(line)]
    return f"the container did not start: {telling[-1] if telling else last}"


async def gather_answers(works: Iterable[Awaitable[T]], seconds: float) -> list[T]:
    """Return all results.

    If some fail, raise one error with the messages of those that fail within `seconds` after the first, without
    consequences of others.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    for task in tasks:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a later error is not reported
    _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if waiting:
        await asyncio.wait(waiting, timeout=seconds)
    errors = [error for task in tasks if task.done() and (error := task.exception())]
    if not all(isinstance(error, LockstepError) for error in errors):
        raise errors[0]
    if causes := [error for error in errors if not isinstance(error, ConsequenceError)] or errors:
        hosts = tuple(host for error in causes if isinstance(error, StartError) for host in error.hosts)
        raise StartError("\n".join(dict.fromkeys(map(str, causes))), hosts)
    return [task.result() for task in tasks]
