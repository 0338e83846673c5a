"""The signals that a launcher receives while it runs one generation of the workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from lockstep.config.run_paths import is_training
from lockstep.config.values import NOTICE
from lockstep.files.output import say
from lockstep.launch.plan.job_plan import JobPlan

# Forwarded unchanged; the workers decide what to do. SIGURG is the notice in LSF's manual, ignored without a handler.
FORWARDED = (*NOTICE, signal.SIGURG)
# Forwarded as SIGTERM, except SIGINT to `lockstep train`. A second Ctrl-C kills the job; a second SIGTERM does not,
# because batch systems send several.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobSignals:
    """The signals received, and what follows from them.

    Args:
        notice: A signal to forward, which came before the workers were started.
        forward: Send a signal to the workers.
        is_running: Whether all workers have been started, and have not been ended.

    Attributes:
        stop: The first signal that asked to stop the job.
        killed: Why the workers were killed; "" if they were not.
        are_late: Whether that is so because they did not stop in time.
        given_up: Set if the workers must not be waited for any longer.
    """

    def __init__(
        self,
        plan: JobPlan,
        notice: signal.Signals | None,
        forward: Callable[[signal.Signals], None],
        is_running: Callable[[], bool],
    ) -> None:
        self.notice = notice
        self.stop: signal.Signals | None = None
        self.killed = ""
        self.are_late = False
        self.given_up = asyncio.Event()
        self._plan = plan
        self._forward = forward
        self._is_running = is_running

    def catch(self) -> None:
        """Start to handle signals."""
        loop = asyncio.get_running_loop()
        for number in (*STOP, *FORWARDED):
            if signal.getsignal(number) != signal.SIG_IGN:  # signals that `nohup` or a shell ignores stay ignored
                loop.add_signal_handler(number, self._on_signal, number)
        if not self._plan.is_local:
            loop.add_signal_handler(signal.SIGTSTP, lambda: None)  # other hosts would consider a silent launcher dead

    def release(self) -> None:
        """Restore the signals' handlers between two jobs."""
        for number in (*STOP, *FORWARDED, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        is_running = self._is_running()
        if number in FORWARDED:
            self.notice = number
            if is_running:  # otherwise it is sent after the start
                self._forward(number)
            return
        again, self.stop = self.stop is not None, self.stop or number
        if not is_running:
            self.given_up.set()
        elif again and number == signal.SIGINT:
            self._kill("all workers were killed on the second Ctrl-C")
        elif not again:
            # In other programs SIGINT is an error, and each worker would print a traceback.
            is_ours = number == signal.SIGINT and is_training(self._plan.command)
            self._forward(signal.SIGINT if is_ours else signal.SIGTERM)
            more = "; press again to kill them" if number == signal.SIGINT else ""
            say(f"\nlockstep: {number.name}: stopping the workers{more}")
            asyncio.get_running_loop().call_later(self._plan.stop_timeout, self._end_late_workers)

    def _end_late_workers(self) -> None:
        self.are_late = not self.killed
        self._kill(f"the workers did not stop within --stop-timeout {self._plan.stop_timeout:g} s and were killed")

    def _kill(self, why: str) -> None:
        self.killed = self.killed or why
        self.given_up.set()

    @property
    def request(self) -> signal.Signals | None:
        """The signal that asked the launcher to stop the job, also if it came after the job's end."""
        return self.stop or self.notice

    async def unless_given_up(self, work: Awaitable[Any]) -> bool:
        """Do the work; return whether it finished before the job was given up."""
        task, given_up = asyncio.ensure_future(work), asyncio.create_task(self.given_up.wait())
        await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True
