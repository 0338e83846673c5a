"""The launcher: carries out a job's plan on all its hosts, from the start to the last process's end.

It speaks with one node process a host (`lockstep.launch.node`). Nothing of torch is imported here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from lockstep.errors import LockstepError, StoppedError
from lockstep.launch.display import Display, Name, OutputPlan, say
from lockstep.launch.failure import Failure, first
from lockstep.launch.lines import Lines
from lockstep.launch.node import NodeJob
from lockstep.launch.plan import JobPlan, NodePlan, handed_on
from lockstep.launch.start import StartError, disagreement, why_not_started
from lockstep.launch.tracebacks import Tracebacks
from lockstep.launch.wire import HEARTBEAT_SECONDS, LIMIT_BYTES, SILENCE_SECONDS, bytes_of, pack, receive
from lockstep.store import LOOPBACK

SETTLE_SECONDS = 0.5  # in which failures that belong together become known
END_SECONDS = 6.0  # in which every node process must have ended its host's part
FORCED_SECONDS = 2.0
NOTICE = (signal.SIGUSR1,)  # forwarded; the job decides
# Forwarded as SIGTERM. A second Ctrl-C ends the job at once; a second SIGTERM does not, as batch systems send several.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = StoppedError.exit_code
T = TypeVar("T")


def run_job(plan: JobPlan, output: OutputPlan, failure_code: int | None = None, direct_stdout: bool = False) -> int:
    """Carry out a plan and wait for its end.

    Args:
        output: How the workers' lines are shown and kept.
        failure_code: The exit code when a worker has failed; None: the worker's own.
        direct_stdout: Workers on this machine write to the launcher's stdout themselves, as progress bars need.

    Returns:
        The job's exit code: 0; that of the worker that failed first (128 + N where signal N ended it); STOPPED when the
        workers have stopped on request after a checkpoint; 128 + N when signal N to the launcher ended the job.

    Raises:
        ConfigError: There can be no files where the output is to be kept.
    """
    return asyncio.run(Job(plan, output, direct_stdout).run(failure_code))


class Remote:
    """A host's node process, as the launcher sees it.

    Args:
        index: Its number among the nodes of this launcher.
        job: Gets its output.
    """

    def __init__(self, index: int, node: NodePlan, job: Job) -> None:
        self.index = index
        self.node = node
        self.first_rank = 0
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._heard = time.monotonic()
        self._last_words: list[bytes] = []
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, first: NodeJob) -> None:
        """Start the node process and hand it the job."""
        kept = [first.stdout] if first.stdout >= 0 else []
        environment = handed_on(os.environ) if self.node.is_here else dict(os.environ)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.node.start,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=LIMIT_BYTES,
                env=environment,
                pass_fds=kept,
                start_new_session=True,  # what a terminal's Ctrl-C means is the launcher's to say
            )
        except OSError as error:
            raise StartError(f"cannot run {self.node.start[0]}: {error.strerror}") from None
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(each) for each in (self._listen(), self._overhear())]
        if first.heartbeat:
            self._tasks.append(asyncio.create_task(self._beat()))
        self.send(asdict(first))

    def answer(self, kind: str) -> asyncio.Future[dict[str, Any]]:
        """The message of a kind, when it comes; a failure if the node process ends before."""
        return self._answers.setdefault(kind, asyncio.get_running_loop().create_future())

    def outcome(self) -> dict[str, Any]:
        """What has been told by now of its part's end."""
        if self.answer("ended").done():
            return self.answer("ended").result()
        return {"lost": "its workers have failed, and it did not say how"} if self.answer("failing").done() else {}

    def send(self, message: dict[str, Any]) -> None:
        if self._process and self._process.stdin and not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def close(self) -> None:
        """End what is left of the connection."""
        for task in self._tasks:
            task.cancel()
        if self._process and self._process.returncode is None:
            if self._process.stdin:
                self._process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), FORCED_SECONDS)
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _listen(self) -> None:
        assert self._process
        assert self._process.stdout
        while message := await receive(self._process.stdout):
            self._heard = time.monotonic()
            match message["is"]:
                case "output":
                    self._job.show(self.first_rank + message["worker"], message["name"], bytes_of(message["text"]))
                case "error":
                    self._lost(message["text"])
                case "alive":
                    pass
                case kind:
                    if kind == "started":
                        self.first_rank = message["first_rank"]
                    if kind == "ended" and not self.answer("started").done():
                        said = message.get("error") or message.get("complaint", "").strip() or "no word of why"
                        self._lost(f"{self.node.host} could not start its workers: {said}")
                    self._resolve(kind, message)
        code = await self._process.wait()
        await self._tasks[1]
        said = b"".join(self._last_words).decode(errors="replace")
        if not self.answer("here").done():
            self._lost(why_not_started(self.node, code, said))
        elif not self.answer("started").done():
            self._lost(f"lost {self.node.host} while its workers were started: {said.strip() or f'exit code {code}'}")
        else:
            self._lost("")

    async def _overhear(self) -> None:
        """What ssh and its like, or Python there, say on their own account."""
        assert self._process
        assert self._process.stderr
        while line := await self._process.stderr.readline():
            self._last_words = [*self._last_words[-20:], line]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.send({"do": "alive"})
            if time.monotonic() - self._heard > SILENCE_SECONDS and self.answer("here").done():
                self._lost(f"has not been heard of for {SILENCE_SECONDS:g} s: the host or the way to it is down")

    def _resolve(self, kind: str, message: dict[str, Any]) -> None:
        if not self.answer(kind).done():
            self.answer(kind).set_result(message)

    def _lost(self, why: str) -> None:
        """No answer will come any more."""
        self._resolve("ended", {"is": "ended", "lost": why or "its part of the launcher has ended unexpectedly"})
        for kind in ("here", "reached", "started"):
            if not self.answer(kind).done():
                self.answer(kind).set_exception(StartError(why))
                self.answer(kind).exception()  # it need not be asked for


class Job:
    """The state of a running job."""

    def __init__(self, plan: JobPlan, output: OutputPlan, direct_stdout: bool) -> None:
        self._plan = plan
        self._display = Display(output)
        self._direct_stdout = direct_stdout and plan.is_local
        self._remotes = [Remote(index, node, self) for index, node in enumerate(plan.nodes)]
        self._lines: dict[tuple[int, Name], Lines] = {}
        self._tracebacks: dict[int, Tracebacks] = {}
        self._seen: dict[int, float] = {}
        self._requested: signal.Signals | None = None
        self._size = plan.workers
        self._give_up = asyncio.Event()

    async def run(self, failure_code: int | None) -> int:
        self._catch()
        show_held = asyncio.create_task(self._show_held())
        try:
            if not await self._unless_given_up(self._start()):
                return self._stopped_early()
            ended = await self._follow()
        except StartError as error:
            say(f"lockstep: {error}")
            return StartError.exit_code
        finally:
            show_held.cancel()
            await self._end(END_SECONDS if not self._give_up.is_set() else 0.0)
            await asyncio.gather(*(remote.close() for remote in self._remotes))
        code = self._conclude(ended, failure_code)
        self._display.close()
        return code

    def _catch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (*STOP, *NOTICE):
            if signal.getsignal(number) != signal.SIG_IGN:  # what `nohup` or a shell has turned off stays so
                loop.add_signal_handler(number, self._on_signal, number)
        if not self._plan.is_local:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # other hosts would take the silence for our death

    def _on_signal(self, number: signal.Signals) -> None:
        started = all(remote.answer("started").done() for remote in self._remotes)
        again = self._requested in STOP
        if number in STOP and (not started or (again and number == signal.SIGINT)):
            self._requested = number
            self._give_up.set()
            return
        if number in STOP and again:
            return
        self._requested = number
        forwarded = signal.SIGTERM if number in STOP else number
        for remote in self._remotes:
            remote.send({"do": "signal", "number": int(forwarded)})
        if number in STOP:
            more = "; once more ends them at once" if number == signal.SIGINT else ""
            say(f"\nlockstep: {number.name}: the workers are asked to stop{more}")
            asyncio.get_running_loop().call_later(self._plan.stop_timeout, self._give_up.set)

    async def _unless_given_up(self, work: Awaitable[Any]) -> bool:
        """Whether the work was done before the job was given up."""
        task, given_up = asyncio.ensure_future(work), asyncio.create_task(self._give_up.wait())
        await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    async def _start(self) -> None:
        """Start the workers on all hosts.

        Raises:
            StartError: A host cannot take part; the message names it and what to do.
        """
        plan = self._plan
        secret = secrets.token_hex(16)
        slots = [] if plan.by_hand else [node.workers for node in plan.nodes]
        try:
            async with asyncio.timeout(plan.start_timeout):
                await _all(remote.start(self._first_message(remote, secret, slots)) for remote in self._remotes)
                here = await self._answers("here")
                if problem := disagreement([node.host for node in plan.nodes], [each["versions"] for each in here]):
                    raise StartError(problem)
                if len(self._remotes) > 1:
                    await self._start_on_several(here[0]["doors"])
                else:
                    self._remotes[0].send({"do": "start", "address": LOOPBACK, "port": 0, "own": LOOPBACK})
                await self._answers("started")
        except TimeoutError:
            late = [each.node.host for each in self._remotes if not each.answer("started").done()]
            raise StartError(
                f"{', '.join(late)} did not start within {plan.start_timeout:g} s; is the network or the file system "
                f"slow there? Give it more by --start-timeout"
            ) from None
        self._size = self._remotes[0].answer("started").result()["size"]

    async def _start_on_several(self, doors: dict[str, int]) -> None:
        """Have the other hosts try the first one's doors, and start all at one that is open to everyone."""
        leader, *others = self._remotes
        for remote in others:
            remote.send({"do": "reach", "doors": doors})
        ways = await _all(remote.answer("reached") for remote in others)
        common = [address for address in doors if all(address in each["ways"] for each in ways)]
        if not common:
            cut_off = [remote.node.host for remote, each in zip(others, ways, strict=True) if not each["ways"]]
            raise StartError(
                f"{', '.join(cut_off) or 'the other hosts'} cannot reach {leader.node.host} at any of its addresses "
                f"({', '.join(doors)}); is there a firewall between them? --interface names the network to use"
            )
        address = common[0]
        start = {"do": "start", "address": address, "port": doors[address]}
        leader.send({**start, "own": address})
        for remote, each in zip(others, ways, strict=True):
            remote.send({**start, "own": each["ways"][address]})

    def _first_message(self, remote: Remote, secret: str, slots: list[int]) -> NodeJob:
        plan, hand = self._plan, self._plan.by_hand
        own = {} if remote.node.is_here else handed_on(plan.own_environment, elsewhere=True)
        return NodeJob(
            node=hand.node if hand else remote.index,
            nodes=hand.nodes if hand else len(plan.nodes),
            workers=remote.node.workers,
            slots=slots,
            host=remote.node.host,
            command=list(plan.command),
            environment={**own, **plan.environment},
            folder=os.getcwd(),
            bind=plan.bind,
            secret=secret,
            heartbeat=not remote.node.is_here,
            stdout=sys.stdout.fileno() if self._direct_stdout else -1,
            interfaces=list(plan.interfaces),
            by_hand=[hand.address, hand.port] if hand else None,
            patience=plan.start_timeout,
            loopback=plan.is_local,
        )

    async def _answers(self, kind: str) -> list[dict[str, Any]]:
        return await _all(remote.answer(kind) for remote in self._remotes)

    async def _follow(self) -> list[dict[str, Any]]:
        """Wait until every host's part has ended, or one has failed; what was told by then, by node."""
        ends = [remote.answer("ended") for remote in self._remotes]
        waiting: set[asyncio.Future[Any]] = {*ends, *(remote.answer("failing") for remote in self._remotes)}
        while not all(end.done() for end in ends):
            if not await self._unless_given_up(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)):
                break
            bad = any(end.done() and _is_bad(end.result()) for end in ends)
            if bad or any(remote.answer("failing").done() for remote in self._remotes):
                await self._unless_given_up(self._end_the_others())
                break
            waiting = {each for each in waiting if not each.done()}
        return [remote.outcome() for remote in self._remotes]

    async def _end_the_others(self) -> None:
        """After a failure: give those that belong to it a moment, end the other hosts' parts, and hear it out."""
        await asyncio.wait([remote.answer("ended") for remote in self._remotes], timeout=SETTLE_SECONDS)
        failing = [remote for remote in self._remotes if remote.answer("failing").done()]
        for remote in self._remotes:
            if remote not in failing:
                remote.send({"do": "end", "seconds": END_SECONDS - 1.0})
        if failing:
            await asyncio.wait([remote.answer("ended") for remote in failing], timeout=END_SECONDS)

    async def _end(self, seconds: float) -> None:
        """End every host's part: the workers get SIGTERM, and what is left after `seconds` SIGKILL."""
        for remote in self._remotes:
            remote.send({"do": "end", "seconds": max(0.0, seconds - 1.0)})
        ends = [remote.answer("ended") for remote in self._remotes if remote.answer("here").done()]
        if ends:
            await asyncio.wait(ends, timeout=seconds + FORCED_SECONDS)

    def _conclude(self, ended: Sequence[dict[str, Any]], failure_code: int | None) -> int:
        """Say how the job has ended, and return its exit code."""
        failures = [
            failure for remote, end in zip(self._remotes, ended, strict=True) for failure in self._of(remote, end)
        ]
        if self._give_up.is_set():
            self._release()
            return self._stopped_early()
        if not failures:
            self._release()
            return 0
        culprit = first(failures)
        if culprit.exit_code == STOPPED:
            self._release()
            by = f" by {self._requested.name}" if self._requested else ""
            say(f"lockstep: stopped{by} after a checkpoint (exit code {STOPPED}); `--resume auto` goes on from there")
            return STOPPED
        if self._requested and culprit.code in (-signal.SIGTERM, -self._requested, 128 + signal.SIGTERM):
            self._release()
            return self._stopped_early()
        say(culprit.tell(self._size))
        return failure_code if failure_code is not None else culprit.exit_code

    def _stopped_early(self) -> int:
        assert self._requested
        say(f"lockstep: stopped by {self._requested.name}; all workers have ended")
        return 128 + self._requested

    def _of(self, remote: Remote, ended: dict[str, Any]) -> list[Failure]:
        """What has failed on a host."""
        host = "" if self._plan.is_local else remote.node.host
        if elsewhere := ended.get("elsewhere"):
            host, told = elsewhere["host"], elsewhere["failures"]
            return [self._failure(host, each) for each in told] or [Failure(-1, host, 1, f"lost {host}", time.time())]
        if why := ended.get("lost"):
            return [Failure(-1, host, 1, f"lost {remote.node.host}: {why}", time.time())]
        failures = [self._failure(host, each) for each in ended.get("failures", ())]
        if ended and not failures and "complaint" in ended and ended["agent_code"] != 0:
            code = ended["agent_code"]
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed: {ended['complaint']}"
            failures.append(Failure(-1, host, code, f"the agent on {remote.node.host} {how}", time.time()))
        if error := ended.get("error"):
            failures.append(Failure(-1, host, 1, f"the agent on {remote.node.host} failed: {error}", time.time()))
        return failures

    def _failure(self, host: str, told: dict[str, Any]) -> Failure:
        rank, text = told["rank"], told.get("text", "")
        if rank in self._tracebacks and not text:
            text = b"".join(self._tracebacks[rank].held).decode(errors="replace").rstrip("\n")
        seen = self._seen.get(rank, told["time"])
        return Failure(rank, host, told["code"], text, seen, told.get("lost_peer", False), self._display.log_of(rank))

    def show(self, rank: int, name: Name, chunk: bytes) -> None:
        """Take in a part of a worker's output; an empty one is its end."""
        stream = self._lines.setdefault((rank, name), Lines())
        lines = stream.feed(chunk) if chunk else stream.rest()
        self._display.keep(rank, name, lines)
        if name == "stderr":
            tracebacks = self._tracebacks.setdefault(rank, Tracebacks())
            lines = tracebacks.feed(lines)
            if tracebacks.held:
                self._seen.setdefault(rank, time.time())
        self._display.show(rank, name, lines)

    async def _show_held(self) -> None:
        """Show the tracebacks of workers that go on."""
        while True:
            await asyncio.sleep(1)
            for rank, tracebacks in self._tracebacks.items():
                self._display.show(rank, "stderr", tracebacks.due())

    def _release(self) -> None:
        for rank, tracebacks in self._tracebacks.items():
            self._display.show(rank, "stderr", tracebacks.release())


async def _all(works: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; if some fail, one error with what they say."""
    tasks = [asyncio.ensure_future(work) for work in works]
    _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if waiting:
        await asyncio.wait(waiting, timeout=SETTLE_SECONDS)
    errors = [error for task in tasks if task.done() and (error := task.exception())]
    if errors:
        raise (
            StartError("\n".join(dict.fromkeys(map(str, errors))))
            if all(isinstance(error, LockstepError) for error in errors)
            else errors[0]
        )
    return [task.result() for task in tasks]


def _is_bad(ended: dict[str, Any]) -> bool:
    return any(name in ended for name in ("lost", "error", "elsewhere")) or bool(
        ended.get("failures") or ended["agent_code"] != 0
    )
