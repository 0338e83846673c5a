"""The launcher's side of `--stage`: shared files are copied to the disks of a job's hosts before its workers start.

A process on each host does the work (`lockstep.launch.node.stager`). For each source, the hosts that lack it form a
chain behind one that has it, or, if none has it, behind the first host, which reads the shared files.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lockstep import __version__
from lockstep.errors import plural, reached_limit
from lockstep.files.output import say
from lockstep.files.untrusted import parse_json, printable
from lockstep.launch.controller.start_errors import StartError, gather_answers, why_not_started
from lockstep.launch.node.copies import BLOCK_BYTES, FILES
from lockstep.launch.plan.job_plan import JobPlan, NodePlan, handed_on
from lockstep.launch.plan.staging import Staging
from lockstep.launch.protocol.messages import LIMIT_BYTES

SETTLE_SECONDS = 1.0  # from the first error to those of other hosts, one of which may be its cause
SHOW_SECONDS = 15.0


class Source(NamedTuple):
    """A file or folder to copy."""

    path: str
    key: str
    bytes: int
    files: int


class HostStager:
    """A host's stager, which answers one question after the other."""

    def __init__(self, node: NodePlan) -> None:
        self.node = node
        self.blocks = 0  # done so far of the present source
        self._has_begun = False
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, first: dict[str, Any]) -> None:
        """Start it, and send the first message.

        Raises:
            StartError: It cannot be started.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.node.stager,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=LIMIT_BYTES,
                env=handed_on(os.environ) if self.node.is_here else None,
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"cannot run {self.node.stager[0]}: {reached_limit(error) or error.strerror}") from None
        await self.ask("begin", **first)
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
                raise kind(f"{self.node.host}: {printable(str(answer['error']))}")
            if [*answer] != ["done_blocks"]:
                return answer
            self.blocks = answer["done_blocks"]
        assert self._process.stderr
        stderr = (await self._process.stderr.read()).decode(errors="replace")
        code = await self._process.wait()
        if self._has_begun:
            last = (stderr.strip() or f"exit code {code}").splitlines()[-1]
            raise StartError(f"lost {self.node.host}: {printable(last)}")
        raise StartError(why_not_started(self.node, code, stderr))

    async def close(self) -> None:
        """End it: it exits when its input ends."""
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), SETTLE_SECONDS)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


class ConsequenceError(StartError):
    """A host could not go on because of another host."""


class JobCopies:
    """The copies of a launcher's job, and the hosts that have them.

    Args:
        by_path: The copy of each path.
    """

    def __init__(self) -> None:
        self.by_path: dict[str, str] = {}
        self._sources: list[Source] = []
        self._nodes: list[NodePlan] = []

    async def bring(self, plan: JobPlan) -> None:
        """Copy what the plan stages to its hosts that were not part of an earlier start.

        Raises:
            StartError: A host cannot be reached, a file cannot be read, or a disk is full.
        """
        known = {node.stager for node in self._nodes}
        lacking = [node for node in plan.nodes if node.stager not in known]
        if not plan.staging or not lacking:
            return
        having = [node for node in plan.nodes if node.stager in known] or self._nodes
        stagers = [HostStager(node) for node in (*having[:1], *lacking)]
        try:
            await self._copy_all(plan, plan.staging, stagers)
        except StartError as error:
            raise StartError(f"--stage: {error}") from None
        finally:
            await asyncio.gather(*(stager.close() for stager in stagers))
        self._nodes += lacking

    async def _copy_all(self, plan: JobPlan, staging: Staging, stagers: Sequence[HostStager]) -> None:
        first, began = stagers[0], time.monotonic()
        job: dict[str, Any] = {"version": __version__, "secret": secrets.token_hex(16), "token": secrets.token_hex(8)}
        job |= {"folder": staging.folder, "interfaces": plan.interfaces, "hosts": len(stagers)}
        try:
            async with asyncio.timeout(plan.start_timeout):
                await gather_answers([stager.start(job) for stager in stagers], SETTLE_SECONDS)
        except TimeoutError:
            raise StartError(
                f"--stage: a host did not answer within {plan.start_timeout:g} s; see --start-timeout"
            ) from None
        is_first = not self._sources
        if is_first:
            self._sources = await self._scan(plan, staging, first)
        checks = [(source.path, source.key, source.bytes) for source in self._sources]
        checked = await gather_answers([stager.ask("check", sources=checks) for stager in stagers], SETTLE_SECONDS)
        for stager, answer in zip(
            stagers, await gather_answers([each.ask("count") for each in stagers], 0.0), strict=True
        ):
            if answer["hosts"] > 1:
                raise StartError(
                    f"{stager.node.host} shares {staging.folder} with other hosts; name a folder that is on each "
                    "host's own disk by --stage-dir"
                )
        copied = 0
        for number, source in enumerate(self._sources):
            blocks = [answer["blocks"][number] for answer in checked]
            chain = [index for index, done in enumerate(blocks) if done is not None]
            copied += bool(chain)
            having = [index for index, done in enumerate(blocks) if done is None]
            if chain and having:
                chain.insert(0, having[0])
            elif chain and not is_first:
                raise StartError(f"no host has the copy of {source.path} any more; start the job again")
            if chain:
                what = f"{source.path} ({plural(source.files, 'file')}, {source.bytes / 1e9:.3g} GB)"
                hosts = plural(sum(done is not None for done in blocks), "host")
                say(f"lockstep: copying {what} to {staging.folder} on {hosts}")
                ports = [checked[index]["listeners"] for index in chain]
                first_block = min(done for done in blocks if done is not None)
                await self._copy(source, [stagers[index] for index in chain], ports, first_block)
            self.by_path[source.path] = os.path.join(staging.folder, source.key, FILES, os.path.basename(source.path))
        if copied:
            say(f"lockstep: copied in {time.monotonic() - began:.1f} s")

    async def _scan(self, plan: JobPlan, staging: Staging, first: HostStager) -> list[Source]:
        environment = {**handed_on(plan.own_environment), **plan.environment}
        path = environment.get("PYTHONPATH", "")
        answer = await first.ask("scan", sources=staging.sources, python_path=path)
        return [Source(*found) for found in answer["found"]]

    async def _copy(self, source: Source, chain: Sequence[HostStager], ports: Sequence[Any], first: int) -> None:
        """Copy a source along a chain of hosts, from block `first` on.

        Args:
            ports: The addresses at which each host listens, and their ports.
        """
        upstream = [{}, *ports]
        names = ["", *(stager.node.host for stager in chain), ""]
        works = [
            asyncio.ensure_future(
                stager.ask(
                    "copy",
                    source=source.path,
                    key=source.key,
                    first=first,
                    upstream=upstream[index],
                    neighbors=names[index : index + 3 : 2],
                )
            )
            for index, stager in enumerate(chain)
        ]
        showing = asyncio.create_task(_show_progress(source, chain[-1]))
        try:
            _, waiting = await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=SETTLE_SECONDS)
            errors = [error for work in works if work.done() and (error := work.exception())]
            causes = [error for error in errors if not isinstance(error, ConsequenceError)] or errors
            if causes:
                raise StartError("\n".join(dict.fromkeys(map(str, causes))))
        finally:
            for task in (showing, *works):
                task.cancel()


async def _show_progress(source: Source, last: HostStager) -> None:
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        share = min(1.0, last.blocks * BLOCK_BYTES / max(1, source.bytes))
        say(f"lockstep: {source.path}: {100 * share:.0f} % copied")
