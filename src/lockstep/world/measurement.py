"""Measures some steps of any program, for `lockstep study scaling` and `batch`, and then ends the program.

A worker whose steps are measured prints its figures as one line, waits until the other workers of its host have done
so, and exits with code 0 in the middle of the program: no exit handlers, checkpoints or evaluations follow. A step
counts from the end of the step before it. Those in which a loader ends or starts, which include an evaluation or the
start of loader processes, are left out. `lockstep train` itself reports its steps, and what comes between them.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from dataclasses import asdict
from functools import partial
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.diagnosis import publisher
from lockstep.diagnosis.observed_steps import RESULT_MARK, WAITS, total_seconds
from lockstep.diagnosis.phases import WAITING
from lockstep.energy.counters import find_counters
from lockstep.energy.meter import EnergyMeter
from lockstep.files.output import send_line
from lockstep.world import accelerator
from lockstep.world.machine import describe_machine
from lockstep.world.observer import Observer
from lockstep.world.step_clock import StepClock

if TYPE_CHECKING:
    import torch

MIN_WARMUP = 2  # steps until it is certain which loader trains
WAIT_SECONDS = 10.0  # for the other workers of the host, at least
WAIT_STEPS = 5.0  # and the time of so many steps
UTILIZATION_SECONDS = 1.0  # at most, which one reading of an accelerator's utilization covers
MAX_INTERRUPTED = 100  # steps after the warm-up, if none counts
COUNTER_SECONDS = 10.0  # 100 times the interval in which GPUs and Cray nodes update their counters
MAX_SHARE = 0.9  # of the free memory, which the workers of a host may take


class Measurement(Observer):
    """Measures steps after warm-up steps.

    Args:
        warmup: The number of steps before, at least `MIN_WARMUP`.
        length: The number of steps to measure.
        needs_samples: End the program after the warm-up if it does not show its samples.
        memory_limit: Bytes that this process may take, "free" for its share of the free memory, or "" for no limit.
    """

    compares_states = False  # in the steps that it measures
    now, cpu_now = staticmethod(time.perf_counter), staticmethod(time.process_time)

    def __init__(self, warmup: int, length: int, needs_samples: bool = False, memory_limit: str = "") -> None:
        super().__init__()
        self._warmup, self._length, self._needs_samples = max(warmup, MIN_WARMUP), length, needs_samples
        self._memory_limit = memory_limit  # until the device is known
        self._limit_bytes: int | None = None
        self._seconds: list[float] = []  # of each measured step
        self._measured: tuple[int, ...] = (0, 0, 0)  # samples, backward passes and exchanges
        self._last_counts: tuple[int, ...] = ()  # at the end of the last step
        self._last_time = 0.0  # the same; 0: not measuring yet
        self._is_interrupted = False  # the current step
        self._counts: list[bool] = []  # whether each step since the warm-up counts
        self._cpu_seconds = self._last_cpu = 0.0  # of this process, in the measured steps
        self._readings: list[float] = []  # of the accelerator's utilization
        self._last_reading = 0.0
        self._energy: tuple[EnergyMeter, float] | None = None  # and when it began

    def follow_trainer(self, clock: StepClock) -> None:
        """Measure the steps that the trainer reports, with the phases of its clock."""
        self.counts.is_told = self._has_forward = True
        self.clock.clock, clock.follower = clock.clock, self.clock
        self._limit_memory()

    def interrupt(self) -> None:
        self._is_interrupted = True

    def loader_ends(self, iterator: Any) -> None:
        super().loader_ends(iterator)
        self._is_interrupted = True

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        super().backward_begins(loss)
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Limit this process's memory once its device is known, so that allocations fail.

        Without a limit, the kernel would kill a process of its choice. After the warm-up, it would be too late:
        allocators keep the memory that they have.
        """
        if not self._memory_limit or self.clock.clock is None:
            return
        device, limit, self._memory_limit = self.clock.clock.device, self._memory_limit, ""
        if device.type != "cpu":
            total = accelerator.total_memory(device)
            self._limit_bytes = total if limit == "free" else min(int(limit), total)
            accelerator.limit_memory(device, self._limit_bytes)
            return
        import psutil

        held = psutil.Process().memory_info().data
        share = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size_bytes = held + int(MAX_SHARE * share) if limit == "free" else int(limit)
        if size_bytes <= held:
            _send({"out_of_memory": f"it takes {held / 1e9:.2g} GB before a backward pass, more than the limit"})
            self._end_program()
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))
        self._limit_bytes = None if limit == "free" else size_bytes

    def step_is_counted(self) -> None:
        if self._last_time:
            self._counts.append(not self._is_interrupted)
            if self._counts[-1]:
                self._add_step()
                self._read_utilization()
            else:
                self._last_reading = self.now()
        elif self.counts.steps >= self._warmup:
            if self._needs_samples and not self.counts.samples:
                _send({"samples_unknown": True})
                self._end_program()
            self.clock.take()  # forgets the warm-up, and waits for the device
            device = self.clock.clock.device if self.clock.clock else None
            gpus = [accelerator.pci_address(device)] if device and device.type != "cpu" else []
            self._energy = EnergyMeter(find_counters(gpus)), self.now()
            self.facts.begin()
            self._last_reading = self.now()
        else:
            if self.clock.clock and self.clock.clock.device.type != "cpu":
                accelerator.utilization(self.clock.clock.device)  # loads the driver's library
            return
        self._is_interrupted, self._last_counts = False, self._current_counts()
        self._last_cpu, self._last_time = self.cpu_now(), self.now()
        if len(self._seconds) == self._length:
            self._print_figures()
            self._end_program()
        if not self._seconds and len(self._counts) == MAX_INTERRUPTED:
            self.finish()
            self._end_program()

    def _add_step(self) -> None:
        if len(self._seconds) == self._length - 1 and self.clock.clock is not None:
            accelerator.synchronize(self.clock.clock.device)
        self._seconds.append(self.now() - self._last_time)
        self._cpu_seconds += self.cpu_now() - self._last_cpu
        now, last = self._current_counts(), self._last_counts
        self._measured = tuple(map(lambda total, end, start: total + end - start, self._measured, now, last))

    def _read_utilization(self) -> None:
        """Read between two steps how busy the accelerator was, if a reading covers only steps that count."""
        clock, now = self.clock.clock, self.now()
        if clock and clock.device.type != "cpu" and now - self._last_reading >= UTILIZATION_SECONDS:
            self._last_reading = now
            if (reading := accelerator.utilization(clock.device)) is not None:
                self._readings.append(reading)

    def _current_counts(self) -> tuple[int, ...]:
        return self.counts.samples, self.backward_passes, self.seen_exchanges() or 0

    def finish(self) -> None:
        """Print what was measured so far, at the early end of the program."""
        if self._seconds:
            self._print_figures()
        elif len(self._counts) > 1:
            reason = "each step begins a new pass over the data; use a smaller batch, or more data"
            _send({"error": reason, "data_too_small": True})
        else:
            wanted = f"{self._warmup} warm-up steps and one to measure"
            _send({"error": f"the program ended after {self.counts.steps} steps; it must make at least {wanted}"})

    def _print_figures(self) -> None:
        timed = self.clock.take()  # at most the last ones
        steps = [step for step, counts in zip(reversed(timed), reversed(self._counts), strict=False) if counts]
        low, middle, high = (
            quantiles(self._seconds, method="inclusive") if len(self._seconds) > 1 else self._seconds * 3
        )
        device = self.clock.clock.device if self.clock.clock else None
        kind = device.type if device else "cpu"
        board = publisher.own_board()
        samples, backward_passes, exchanges = self._measured
        rank, workers = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        _send(
            {
                "figures": {
                    "steps_per_second": len(self._seconds) / sum(self._seconds),
                    "samples_per_second": samples / sum(self._seconds) or None,
                    "step_seconds": {"low": low, "median": middle, "high": high},
                    "phase_seconds": {
                        phase: seconds / max(len(steps), 1) for phase, seconds in total_seconds(steps).items()
                    },
                    "measured_steps": len(self._seconds),
                    "waits": [step.get(WAITING, 0.0) for step in steps[:WAITS]],
                    "program": asdict(self.read_facts()),
                    "backward_passes_per_step": backward_passes / len(self._seconds),
                    "exchanges": None if self.seen_exchanges() is None else exchanges,
                    "utilization": self._utilization(kind),
                    **self._power(),
                    "peak_memory_bytes": accelerator.peak_memory(device),
                    "memory": "resident" if kind == "cpu" else "device",
                    "memory_limit_bytes": self._limit_bytes,
                    "device": kind,
                    "gpu": accelerator.name(device) if kind != "cpu" else None,
                    "environment": describe_machine(workers) if rank == 0 else None,
                    "connected": board is not None and board.has_met,
                }
            }
        )

    def _power(self) -> dict[str, Any]:
        """Return the mean watts of each counter in the measured time; other workers of this host may read the same."""
        if self._energy is None:
            return {}
        meter, began = self._energy
        meter.update()
        seconds, host = self.now() - began, socket.gethostname()
        if meter.counters and seconds < COUNTER_SECONDS:
            return {"energy_unread": [f"it takes {COUNTER_SECONDS:g} s of steps; increase --steps"]}
        watts = [[host, each.name, each.kind, meter.joules[each.name] / seconds] for each in meter.counters]
        return {"counter_watts": watts, "energy_unread": meter.unread}

    def _utilization(self, kind: str) -> float | None:
        """Return the busy share of the accelerator or, on a CPU, of a core for each of the worker's threads.

        An accelerator's is None if it is unknown, or the steps took less than a second.
        """
        import torch

        if kind != "cpu":
            return fmean(self._readings) if self._readings else None
        return self._cpu_seconds / (sum(self._seconds) * torch.get_num_threads())

    def _end_program(self) -> NoReturn:
        publisher.exit_early(max(WAIT_SECONDS, WAIT_STEPS * max(self._seconds, default=0.0)))


_send = partial(send_line, RESULT_MARK)
