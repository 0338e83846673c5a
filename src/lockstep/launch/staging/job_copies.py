"""The launcher's side of `--stage`: shared files are copied to the disks of a job's hosts before its workers start.

A process on each host (`lockstep.launch.staging.stager`) has the copies until the launcher ends. The hosts that lack
them form a chain behind one that has them or, if none has them, behind the first host, which reads the shared files.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep import __version__
from lockstep.config.run_paths import is_training
from lockstep.errors import plural, printable
from lockstep.files.output import say
from lockstep.files.staged import copy_of
from lockstep.files.untrusted import parse_json
from lockstep.launch.controller.host_process import start_process
from lockstep.launch.controller.start_errors import ConsequenceError, StartError, gather_answers, why_not_started
from lockstep.launch.plan.job_plan import JobPlan, NodePlan, OtherNodes
from lockstep.launch.plan.worker_variables import handed_on
from lockstep.launch.protocol.messages import HostProcess
from lockstep.launch.protocol.reachability import proof
from lockstep.launch.staging.stage_options import ENVIRONMENT, StageOptions, path_in, with_copies

SETTLE_SECONDS = 1.0  # after the first error: another host's error may be its cause
REMOVE_SECONDS = 120.0  # for a host to remove its copies: 20 s for 97,000 files on a slow disk


class HostStager:
    """A host's stager, which is started by the first request."""

    def __init__(self, node: NodePlan, others: OtherNodes | None) -> None:
        self.node = replace(node, start=node.stager, in_container=False)
        self._others = others
        self._requests = 0
        self._process: HostProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_code is None

    async def ask(self, request: str, **values: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            StartError: The host cannot be reached, reports an error, or disconnects.
            ConsequenceError: It reports an error of another host.
        """
        if not self._process and self.node.is_relayed and self._others:
            self._process = await self._others.start(self.node.host, stager=True)
        elif not self._process:
            self._process = await start_process(self.node.start, self.node.is_here)
        self._requests += 1
        message = {"request": request, "number": self._requests, **values}
        self._process.send(json.dumps(message).encode() + b"\n")
        while line := await self._process.readline():
            try:
                answer = parse_json(line)
            except ValueError:  # such as a login banner
                continue
            if not isinstance(answer, dict) or answer.get("number") != self._requests:  # to one that was cancelled
                continue
            if "error" in answer:
                kind = ConsequenceError if answer.get("is_consequence") else StartError
                raise kind(f"{self.node.host}: {printable(str(answer['error']))}", (self.node.host,))
            return answer
        code, stderr = await self._process.wait(), self._process.last_lines
        if self._requests > 1:
            last = (stderr.strip() or f"exit code {code}").splitlines()[-1]
            raise StartError(f"lost {self.node.host}: {printable(last)}", (self.node.host,))
        raise StartError(why_not_started(self.node, code, stderr), (self.node.host,))

    async def close(self) -> None:
        """End it: it removes the copies and exits when its input ends."""
        if self._process:
            await self._process.close(REMOVE_SECONDS)


class JobCopies:
    """The copies of a launcher's job, which each host keeps until `close`. `by_path` maps paths to copies."""

    def __init__(self) -> None:
        self.by_path: dict[str, str] = {}
        self._stagers: dict[tuple[str, ...], HostStager] = {}  # those that have the copies, by `NodePlan.key`
        self._arguments: dict[str, str] = {}  # the copies of paths that the command names
        self._lock = asyncio.Lock()  # spares may be prepared while a host is replaced

    def in_command(self, plan: JobPlan) -> tuple[str, ...]:
        """Return the workers' command, with the copies of paths that exist in the sources.

        A training records the paths as they are given, and finds the copies itself.
        """
        return plan.command if is_training(plan.command) else with_copies(plan.command, self._arguments)

    async def bring(self, plan: JobPlan, nodes: Sequence[NodePlan]) -> None:
        """Copy what the plan stages to the nodes that lack it.

        Raises:
            StartError: A host cannot be reached, a file cannot be read, or a disk is full.
        """
        if not plan.staging:
            return
        async with self._lock:
            have = {key: stager for key, stager in self._stagers.items() if stager.is_running}
            having = [have[node.key] for node in nodes if node.key in have]
            new = {node.key: HostStager(node, plan.others) for node in nodes if node.key not in have}
            if not new:
                return
            try:
                await self._copy(plan, plan.staging, having[:1], [*new.values()])
            except BaseException as error:
                await asyncio.gather(*(stager.close() for stager in new.values()))
                if not isinstance(error, StartError):
                    raise
                lines = (f"--stage: {line}" for line in str(error).splitlines())
                raise StartError("\n".join(lines), error.hosts) from None
            self._stagers |= new

    async def close(self) -> None:
        """Remove the copies from all hosts."""
        stagers = list(self._stagers.values())
        self._stagers.clear()
        await asyncio.gather(*(stager.close() for stager in stagers))

    async def _copy(
        self, plan: JobPlan, staging: StageOptions, having: Sequence[HostStager], new: Sequence[HostStager]
    ) -> None:
        chain, began = [*having, *new], time.monotonic()
        job: dict[str, Any] = {"version": __version__, "folder": staging.folder, "interfaces": plan.interfaces}
        sent = secrets.token_hex(16)
        own = copies_secret(plan.others.secret, sent) if plan.others else sent
        begin = [
            stager.ask(
                "prepare", has_next=stager is not chain[-1], secret=sent if stager.node.is_relayed else own, **job
            )
            for stager in chain
        ]
        try:
            async with asyncio.timeout(plan.start_timeout):
                prepared = await gather_answers(begin, SETTLE_SECONDS)
        except TimeoutError:
            raise StartError(f"no answer within {plan.start_timeout:g} s; see --start-timeout") from None
        if not having:
            await self._find(plan, staging, chain[0])
        say(f"lockstep: copying {', '.join(self.by_path)} to {staging.folder} on {plural(len(new), 'host')}")
        upstream = [{}, *(answer["ports"] for answer in prepared)]
        names = ["", *(stager.node.host for stager in chain), ""]
        copies = [
            stager.ask("copy", upstream=upstream[index], neighbors=names[index : index + 3 : 2])
            for index, stager in enumerate(chain)
        ]
        answers = await gather_answers(copies, SETTLE_SECONDS)
        for stager, before, after in zip(chain[1:], answers, answers[1:], strict=False):
            if before["sha256"] != after["sha256"]:
                raise StartError(f"{stager.node.host}: the files were damaged on their way; start the job again")
        say(f"lockstep: copied {answers[0]['size'] / 1e6:,.1f} MB in {time.monotonic() - began:.1f} s")

    async def _find(self, plan: JobPlan, staging: StageOptions, first: HostStager) -> None:
        """Let a host find the sources."""
        environment = {**handed_on(plan.own_environment), **plan.environment}
        python_path, paths = environment.get("PYTHONPATH", ""), [*map(path_in, plan.command[1:])]
        answer = await first.ask("find", sources=staging.sources, python_path=python_path, paths=paths)
        self.by_path, self._arguments = answer["copies"], answer["named"]
        for path in staging.sources:
            is_named = path == ENVIRONMENT or any(copy_of(each, {path: path}) for each in self._arguments)
            if not is_named and not is_training(plan.command):
                say(f"lockstep: the command names no file in {path}; the script finds the copy by lockstep.staged")


def copies_secret(secret: str, sent: str) -> str:
    """Return the secret of manually started nodes for their copies, from their own and what the first one has sent."""
    return proof(secret, "copies", sent.encode()).hex()
