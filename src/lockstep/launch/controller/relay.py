"""A manually started node other than the first: it joins the job, and carries the lines of its node process.

The first node's launcher is the launcher of all nodes. A process there may be a stranger's if the nodes have no secret,
so this node runs only its own command, in its own folder and environment. The launcher decides about the rest: when
the workers start, their ranks, and when they end. If the user has started a study here, or staging, this node obeys
the launcher's command; then each line proves that it comes from a node with the secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.config.run_paths import COMMAND, typed_command
from lockstep.diagnosis import OBSERVE, REPORT
from lockstep.errors import printable
from lockstep.files.output import say
from lockstep.files.untrusted import parse_json
from lockstep.launch.controller.host_process import Subprocess, start_process
from lockstep.launch.controller.image_packages import copy_packages
from lockstep.launch.controller.job_signals import FORWARDED, STOP
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.node.job_folders import SNAPSHOTS_PREFIX, new_snapshots_path
from lockstep.launch.plan.job_plan import JobPlan, ManualNode
from lockstep.launch.protocol import messages
from lockstep.launch.protocol.handshake import MeetingError, SealedLines, StrangerError, introduce
from lockstep.launch.staging.job_copies import REMOVE_SECONDS, copies_secret
from lockstep.world import STARTED
from lockstep.world.peer_loss import detect_loss

# What the launcher may set or add here; other values could be code.
VARIABLES = (STARTED, OBSERVE, REPORT)
FLAGS = ("--run-dir", "--batch-workers")


class Relay:
    """This node's part of the job.

    Args:
        plan: Its part as it would be on its own.
        address: The first node's address, not a host name.
        own: This host's address to connect from; "" lets the system choose.
        secret: As in `introduce`.
    """

    def __init__(self, plan: JobPlan, manual: ManualNode, address: str, own: str, secret: str) -> None:
        self._plan = plan
        self._address = address
        self._port = manual.port
        self._own = own
        self._secret = secret
        self._newcomer = messages.Introduction(
            manual.node, manual.nodes, plan.workers, socket.gethostname(), plan.obeys
        )
        self._where = f"{manual.address}:{manual.port}"
        self._launcher: SealedLines | None = None
        self._processes: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Future[int] | None = None
        self._has_started = False

    async def run(self) -> int:
        """Take part until the job finishes, and return its exit code; 1 if the first node disconnects.

        Raises:
            StartError: The first node is not found in time, or refuses this one.
        """
        loop = asyncio.get_running_loop()
        self._leaving = loop.create_future()
        for number in (*STOP, *FORWARDED):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGTSTP, lambda: None)  # the launcher would consider this node dead
        joining = asyncio.create_task(self._take_part())
        try:
            await asyncio.wait((joining, self._leaving), return_when=asyncio.FIRST_COMPLETED)
            return joining.result() if joining.done() else self._leaving.result()
        except (MeetingError, OSError) as error:
            raise StartError(f"cannot join the first node at {self._where}: {error}") from None
        finally:
            joining.cancel()
            await asyncio.wait([joining])
            await self._end_processes()

    def _on_signal(self, number: signal.Signals) -> None:
        """Pass a signal to the launcher, which ends the job or hands it to all workers; SIGHUP ends only this node."""
        assert self._leaving
        is_stop = number in STOP
        if is_stop and (number == signal.SIGHUP or not self._has_started):
            self._leave(number)
        elif self._launcher and self._has_started:
            self._launcher.send(messages.pack(messages.Signal(int(number))))
            if is_stop:
                seconds = self._plan.stop_timeout + self._plan.timings.caller_end  # if the launcher does not obey
                asyncio.get_running_loop().call_later(seconds, self._leave, number)

    def _leave(self, number: signal.Signals) -> None:
        if self._leaving and not self._leaving.done():
            say(f"\nlockstep: {number.name}: this node leaves the job")
            self._leaving.set_result(128 + number)

    async def _take_part(self) -> int:
        deadline = time.time() + self._plan.start_timeout
        if self._plan.container:
            await asyncio.to_thread(copy_packages, Path(self._plan.container.packages))
        while True:
            self._launcher = launcher = await self._find(deadline)
            try:
                code = await self._obey(launcher)
            finally:
                self._launcher = None
                launcher.writer.close()
            if code is not None:
                say(f"lockstep: the job finished with exit code {code}")
                return code
            if self._has_started:
                say(f"lockstep: lost the first node at {self._where}; the workers here were ended")
                return 1
            await asyncio.sleep(self._plan.timings.reconnect)  # it was ended before the job started, and may come again

    async def _find(self, deadline: float) -> SealedLines:
        """Connect to the first node, which may start later."""
        explaining = asyncio.create_task(self._explain(deadline))
        try:
            async with asyncio.timeout(deadline - time.time()):
                while True:
                    with suppress(OSError, StrangerError):  # TimeoutError is an OSError
                        return await self._connect("")
                    await asyncio.sleep(self._plan.timings.reconnect)
        except TimeoutError:
            seconds = self._plan.start_timeout
            raise MeetingError(f"no answer within {seconds:g} s; check that it runs, and --master-addr") from None
        finally:
            explaining.cancel()

    async def _explain(self, deadline: float) -> None:
        await asyncio.sleep(self._plan.timings.connect)
        until = time.strftime("%H:%M:%S", time.localtime(deadline))
        say(f"lockstep: waiting for the first node at {self._where} until {until} (--start-timeout)")

    async def _connect(self, ticket: str) -> SealedLines:
        """Connect to the first node, and prove the secret.

        Args:
            ticket: As in `Introduction`.

        Raises:
            MeetingError: It refuses this node, does not have the secret, or this host lacks `own`.
            StrangerError: Another program answers.
            OSError: Nothing answers.
        """
        connection = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        timings = self._plan.timings
        try:
            if self._own:
                try:
                    connection.bind((self._own, 0))
                except OSError as error:
                    raise MeetingError(f"cannot connect from {self._own}: {error.strerror}") from None
            async with asyncio.timeout(timings.connect):
                await asyncio.get_running_loop().sock_connect(connection, (self._address, self._port))
                detect_loss(connection, timings.silence)
                seals = await introduce(connection, replace(self._newcomer, ticket=ticket), self._secret)
            return SealedLines(*await asyncio.open_connection(sock=connection, limit=messages.LIMIT_BYTES), seals)
        except BaseException:
            connection.close()
            raise

    async def _obey(self, launcher: SealedLines) -> int | None:
        """Obey the launcher; return the job's exit code, or None if it disconnects."""
        has_joined = False
        with suppress(OSError, messages.MessageError):
            while message := await messages.receive(launcher):
                match message:
                    case messages.Refused(why):
                        raise MeetingError(printable(why))
                    case messages.Alive():
                        if not has_joined:
                            say(f"lockstep: connected to the first node at {self._where}, which shows all output")
                        has_joined = True
                        launcher.send(messages.pack(messages.Alive()))
                    case messages.Announcement(text):
                        say(printable(text))
                    case messages.Launch(ticket, stager):
                        self._has_started = True
                        task = asyncio.create_task(self._run_process(ticket, stager and self._plan.obeys))
                        self._processes.add(task)
                        task.add_done_callback(self._processes.discard)
                    case messages.JobOver(code):
                        return code
        return None

    async def _run_process(self, ticket: str, stager: bool) -> None:
        """Run a node process, or a stager, and carry its lines."""
        node, seconds = self._plan.nodes[0], REMOVE_SECONDS if stager else self._plan.timings.job_end
        process = await start_process(node.stager if stager else node.start, node.is_here)
        try:
            with suppress(OSError, StrangerError, MeetingError):  # the launcher notices that the process ends
                lines = await self._connect(ticket)
                try:
                    await self._carry(process, lines, self._for_stager if stager else self._checked)
                finally:
                    lines.writer.close()
        finally:
            await process.close(seconds)

    async def _carry(self, process: Subprocess, lines: SealedLines, checked: Callable[[bytes], bytes]) -> None:
        down = asyncio.create_task(self._hand_down(lines, process, checked))
        try:
            while line := await process.readline():
                lines.send(line)
                await lines.writer.drain()
            lines.send(messages.pack(messages.NodeExited(await process.wait(), process.last_lines)))
            await lines.writer.drain()
        finally:
            down.cancel()

    async def _hand_down(self, lines: SealedLines, process: Subprocess, checked: Callable[[bytes], bytes]) -> None:
        """Carry the launcher's lines until it disconnects, or one does not come from it."""
        try:
            while line := await lines.readline():
                process.send(checked(line))
        except (ValueError, messages.MessageError):
            pass
        finally:
            process.stdin.close()

    def _for_stager(self, line: bytes) -> bytes:
        """Return a request with this node's interfaces and the copies' secret, which is not sent between the nodes."""
        request = parse_json(line)
        if "secret" in request:
            request["secret"] = copies_secret(self._secret, request["secret"])
            request["interfaces"] = self._plan.interfaces
        return json.dumps(request).encode() + b"\n"

    def _checked(self, line: bytes) -> bytes:
        """Return what the node process may receive of a line."""
        try:
            message: messages.Message | None = messages.unpack(line)
            if isinstance(message, messages.NodeJob):
                message = self._own_job(message)
        except messages.MessageError:
            message = None
        return messages.pack(message) if message else b""

    def _own_job(self, job: messages.NodeJob) -> messages.NodeJob:
        """Return a job with this node's folder and devices and, unless it obeys, its command and environment.

        Raises:
            MessageError: The launcher adds something that it may not.
        """
        plan, added = self._plan, job.added
        snapshots = Path(job.snapshots)
        own_snapshots = new_snapshots_path().parent / f"{snapshots.name}-{self._newcomer.node}"  # on a shared host, too
        is_snapshots = re.fullmatch(rf"{SNAPSHOTS_PREFIX}[0-9a-f]+", snapshots.name)
        if not set(added[::2]) <= {*FLAGS} or (job.snapshots and not is_snapshots):
            raise messages.MessageError("unexpected arguments")
        allowed = job.environment if plan.obeys else VARIABLES
        given = {name: job.environment[name] for name in allowed if name in job.environment}
        own = {**plan.nodes[0].environment(plan.own_environment), **plan.environment, COMMAND: typed_command()}
        return replace(
            job,
            command=job.command if plan.obeys else (*plan.command, *added),
            added=(),
            environment=own | given,
            folder=os.getcwd(),
            bind=plan.bind,
            heartbeat=True,
            stdout=-1,
            terminal=False,
            interfaces=plan.interfaces,
            snapshots=str(own_snapshots) if job.snapshots else "",
        )

    async def _end_processes(self) -> None:
        """End the node processes, which end their workers."""
        for task in self._processes:
            task.cancel()
        await asyncio.gather(*self._processes, return_exceptions=True)
