"""The launcher's side of `--stage`: shared files are copied to the disks of a job's hosts before its workers start.

A process on each host does the work (`lockstep.launch.node.stager`). For each source, the hosts that lack it form a
chain behind one that has it, or, if none has it, behind the first host, which reads the shared files.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep import __version__
from lockstep.config.run_paths import is_training
from lockstep.errors import plural
from lockstep.files.output import say
from lockstep.files.staged import copy_of
from lockstep.files.untrusted import parse_json, printable
from lockstep.launch.controller.host_process import end_process, read_last_lines, start_process
from lockstep.launch.controller.start_errors import ConsequenceError, StartError, gather_answers, why_not_started
from lockstep.launch.plan.job_plan import JobPlan, NodePlan
from lockstep.launch.plan.stage_options import BLOCK_BYTES, ENVIRONMENT, StageOptions, named_paths, with_copies
from lockstep.launch.plan.worker_variables import handed_on

SETTLE_SECONDS = 1.0  # from the first error to those of other hosts, one of which may be its cause
SHOW_SECONDS = 15.0


class StagedSource(NamedTuple):
    """A file or folder to copy, the name and path of its copy, and what the copy takes on a disk."""

    path: str
    name: str
    copy: str
    files: int
    bytes: int
    disk_bytes: int


class HostStager:
    """A host's stager, which answers one question after the other."""

    def __init__(self, node: NodePlan) -> None:
        self.node = replace(node, start=node.stager, in_container=False)
        self.blocks = 0  # done so far of the present source
        self._has_begun = False
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines = bytearray()
        self._reading: asyncio.Task[None] | None = None

    async def begin(self, job: dict[str, Any]) -> None:
        """Start it, and send the first message.

        Raises:
            StartError: It cannot be started.
        """
        self._process = await start_process(self.node.start, self.node.is_here)
        self._reading = asyncio.create_task(read_last_lines(self._process, self._last_lines))
        await self.ask("begin", **job)
        self._has_begun = True

    async def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            StartError: The host reports an error, or disconnects.
            ConsequenceError: It reports an error of another host.
        """
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"ask": what, **values}).encode() + b"\n")
        with suppress(ConnectionError):  # the end of its output is noticed
            await self._process.stdin.drain()
        while line := await self._process.stdout.readline():
            try:
                answer = parse_json(line)
            except ValueError:  # such as a login banner
                continue
            if not isinstance(answer, dict):
                continue
            if "error" in answer:
                kind = ConsequenceError if answer.get("is_consequence") else StartError
                raise kind(f"{self.node.host}: {printable(str(answer['error']))}", (self.node.host,))
            if "done_blocks" not in answer:
                return answer
            self.blocks = answer["done_blocks"]
        code = await self._process.wait()
        assert self._reading
        await asyncio.wait([self._reading], timeout=SETTLE_SECONDS)
        stderr = self._last_lines.decode(errors="replace")
        if self._has_begun:
            last = (stderr.strip() or f"exit code {code}").splitlines()[-1]
            raise StartError(f"lost {self.node.host}: {printable(last)}", (self.node.host,))
        raise StartError(why_not_started(self.node, code, stderr), (self.node.host,))

    async def close(self, seconds: float) -> None:
        """End it: it exits when its input ends."""
        if self._reading:
            self._reading.cancel()
        if self._process:
            await end_process(self._process, seconds)


class JobCopies:
    """The copies of a launcher's job: that of each path is in `by_path`."""

    def __init__(self) -> None:
        self.by_path: dict[str, str] = {}
        self._sources: list[StagedSource] = []
        self._arguments: dict[str, str] = {}  # the copies of paths that the command names

    def in_command(self, plan: JobPlan) -> tuple[str, ...]:
        """Return the workers' command, with the copies of paths that exist in the sources.

        A training records the paths as they are given, and finds the copies itself.
        """
        return plan.command if is_training(plan.command) else with_copies(plan.command, self._arguments)

    @asynccontextmanager
    async def brought(
        self, plan: JobPlan, new: Sequence[NodePlan], old: Sequence[NodePlan] = ()
    ) -> AsyncIterator[None]:
        """Copy what the plan stages to new hosts, and hold the copies until the context ends.

        Args:
            new: Hosts without a node process, which would hold them.
            old: The other hosts of the plan.

        Raises:
            StartError: A host cannot be reached, a file cannot be read, or a disk is full.
        """
        stagers = [HostStager(node) for node in (*old[:1], *new)] if plan.staging and new else []
        try:
            if plan.staging and stagers:
                try:
                    await self._bring(plan, plan.staging, stagers, bool(old))
                except StartError as error:
                    lines = (f"--stage: {line}" for line in str(error).splitlines())
                    raise StartError("\n".join(lines), error.hosts) from None
            yield
        finally:
            await asyncio.gather(*(stager.close(plan.timings.close) for stager in stagers))

    async def _bring(self, plan: JobPlan, staging: StageOptions, stagers: Sequence[HostStager], has_old: bool) -> None:
        job: dict[str, Any] = {"version": __version__, "secret": secrets.token_hex(16), "token": secrets.token_hex(8)}
        job |= {"folder": staging.folder, "interfaces": plan.interfaces, "hosts": len(stagers)}
        began = time.monotonic()
        try:
            async with asyncio.timeout(plan.start_timeout):
                await gather_answers([stager.begin(job) for stager in stagers], SETTLE_SECONDS)
        except TimeoutError:
            raise StartError(f"no answer within {plan.start_timeout:g} s; see --start-timeout") from None
        if not has_old:
            await self._scan(plan, staging, stagers[0])
        unique = {source.name: source for source in self._sources}
        needed = {name: source.disk_bytes for name, source in unique.items()}
        checked = await gather_answers([stager.ask("check", needed=needed) for stager in stagers], SETTLE_SECONDS)
        lacks = False
        for name, source in unique.items():
            blocks = [answer["blocks"][name] for answer in checked]
            chain = [index for index, done in enumerate(blocks) if done is not None]
            if not chain:
                continue
            lacks = True
            size = f"{source.bytes / 1e9:.1f} GB" if source.bytes >= 1e9 else f"{source.bytes / 1e6:.1f} MB"
            what = f"{source.path} ({plural(source.files, 'file')}, {size})"
            say(f"lockstep: copying {what} to {staging.folder} on {plural(len(chain), 'host')}")
            first = min(blocks[index] for index in chain)
            chain = [*(index for index, done in enumerate(blocks) if done is None)][:1] + chain
            ports = [checked[index]["listeners"] for index in chain]
            await _copy(source, [stagers[index] for index in chain], ports, first)
        if lacks:
            say(f"lockstep: copied in {time.monotonic() - began:.1f} s")

    async def _scan(self, plan: JobPlan, staging: StageOptions, first: HostStager) -> None:
        """Ask a host what there is to copy: at the first start, or if no host of it is left."""
        environment = {**handed_on(plan.own_environment), **plan.environment}
        paths = [source for source in staging.sources if source != ENVIRONMENT]
        named = named_paths(plan.command, paths)
        path = environment.get("PYTHONPATH", "")
        answer = await first.ask("scan", sources=staging.sources, python_path=path, paths=named)
        sources = [StagedSource(*found) for found in answer["found"]]
        if self._sources and sources != self._sources:
            changed = ", ".join(now.path for now, then in zip(sources, self._sources, strict=False) if now != then)
            raise StartError(f"{changed} has changed since the job began; start the job again")
        if self._sources:
            return
        self._sources = sources
        self.by_path = {source.path: source.copy for source in sources}
        self._arguments = {path: copy_of(path, self.by_path) for path in answer["existing"]}
        for path in paths:
            if not is_training(plan.command) and not any(copy_of(each, {path: path}) for each in self._arguments):
                say(f"lockstep: the command names no file in {path}; the script finds the copy by lockstep.staged")


async def _copy(source: StagedSource, chain: Sequence[HostStager], ports: Sequence[Any], first: int) -> None:
    """Copy a source along a chain of hosts, from block `first` on.

    Args:
        ports: The addresses at which each host listens, and their ports.
    """
    upstream = [{}, *ports]
    names = ["", *(stager.node.host for stager in chain), ""]
    showing = asyncio.create_task(_show_progress(source, chain[-1]))
    try:
        await gather_answers(
            [
                stager.ask(
                    "copy",
                    name=source.name,
                    first=first,
                    upstream=upstream[index],
                    neighbors=names[index : index + 3 : 2],
                )
                for index, stager in enumerate(chain)
            ],
            SETTLE_SECONDS,
        )
    finally:
        showing.cancel()


async def _show_progress(source: StagedSource, last: HostStager) -> None:
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        share = min(1.0, last.blocks * BLOCK_BYTES / max(1, source.bytes))
        say(f"lockstep: {source.path}: {100 * share:.0f} % copied")
