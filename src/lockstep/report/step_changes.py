"""Changes that shorten a step, each with the share of the time per sample that it is expected to save.

A gain that depends on something unknown, such as how much of an exchange overlaps the backward pass, has an interval
that covers both extremes. `benchmarks/explain.py` compares predictions with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.config.schema import TrainConfig
from lockstep.report.measured_step import COMPUTE, MeasuredStep, SlowRank

WORTH = 0.05  # of the time per sample; smaller gains are not worth a change
WORTH_A_BATCH = 0.1  # a larger batch also changes the training
CERTAIN = 0.02  # which a change must save in the worst case
MAX_CHANGES = 2
BUCKET_BYTES = 25e6  # of DistributedDataParallel
BUCKET_SECONDS = 3e-3  # at most, of an exchange between hosts, whatever its size
HOST_RATE, GPU_HOST_RATE = 4e8, 5e9  # bytes per second within a host, at least
CAST_SECONDS = 3e-10  # per byte of gradients, to 16 bits and back, on a CPU
POWERSGD_SECONDS = 2.4e-9  # per byte of gradients and thread of a CPU
GPU_SECONDS = 2e-12  # for both on a GPU
POWERSGD_SHARE = 0.015  # of the bytes
MIN_POWERSGD_BYTES = 4e6
MAX_PROCESSES = 16
MIN_FREE_CORES = 0.25  # with fewer, more loader processes only take the cores of other work
SERIAL_SHARE = 0.05  # of computing, which more threads do not shorten
SHARED_CORES = 1.4  # computing is slower by this power of the threads per core, as threads wait for each other
PASSES = 4
IDLE = 0.5  # share of the time in which a GPU computes nothing, and no known wait explains it
LARGER = ("accumulate", "batch")  # changes that increase the samples of a step
COMPRESS = {
    "ddp": "send 16-bit gradients (DDP's bf16_compress_hook; in lockstep train --compress bf16)",
    "hvd": "send 16-bit gradients (compression=hvd.Compression.fp16)",
}
POWERSGD = "approximate gradients by PowerSGD (DDP's powerSGD_hook; in lockstep train --compress powersgd)"


@dataclass(frozen=True)
class ProposedChange:
    """A change, and the share of the time per sample that it saves: expected, at least and at most.

    Args:
        high: 0: no saving is predicted.
        value: The new number of loader processes or threads, or how many times the samples of a step.
    """

    kind: str
    action: str
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    value: int = 0

    def describe(self) -> str:
        if not self.high:
            return self.action
        return f"{self.action}: {percent(self.gain)} less time per sample ({percent(self.low)} to {percent(self.high)})"


def best_changes(step: MeasuredStep, slow: SlowRank | None) -> tuple[ProposedChange, ...]:
    """Return the changes that save most, if that is worth it, and more than the measurements differ."""
    found = [each for each in possible_changes(step, slow) if each.gain >= _least(each, step) and each.low >= CERTAIN]
    links, others = _links(step), [*_host_waits(step), *_idle_gpu(step)][:1]
    found = sorted(found, key=lambda change: -change.gain)[: MAX_CHANGES - len(links) - len(others)]
    return (*links, *found, *others)


def _host_waits(step: MeasuredStep) -> list[ProposedChange]:
    """Return the advice to let the host run ahead of a GPU; what that saves depends on the program."""
    seconds = step.facts.host_wait
    if seconds < WORTH * step.seconds:
        return []
    where = "such as in .item(), .cpu() or print(loss)"
    action = f"let the host run ahead of the GPU: it waits for the GPU {1e3 * seconds:.3g} ms of each step, {where}"
    return [ProposedChange("host waits", action)]


def _idle_gpu(step: MeasuredStep) -> list[ProposedChange]:
    """Return the advice to use fewer, larger kernels; what that saves depends on the program."""
    if step.idle_share <= IDLE:
        return []
    action = "fewer, larger kernels, because starting them takes longer than they do: a larger batch per worker, "
    return [ProposedChange("idle GPU", f"{action}torch.compile, or CUDA graphs (torch.compile's mode=reduce-overhead)")]


def _links(step: MeasuredStep) -> list[ProposedChange]:
    """Return the advice on a named link, which all workers of a ring wait for."""
    if step.transfer < WORTH * step.seconds:
        return []
    return [ProposedChange("link", f"the {link.name}: {link.evidence}; {link.advice}") for link in step.slow_links[:1]]


def _least(change: ProposedChange, step: MeasuredStep) -> float:
    return max(WORTH_A_BATCH if change.kind in LARGER else WORTH, step.difference)


def possible_changes(step: MeasuredStep, slow: SlowRank | None) -> Iterator[ProposedChange]:
    """Return all changes with a prediction, whatever they save."""
    yield from _compressions(step)
    yield from filter(None, (rule(step) for rule in (_larger_batch, _loader_processes, _threads)))
    if slow:
        yield _relieve(step, slow)


def _change(
    step: MeasuredStep, kind: str, action: str, saved: float, lower: float, upper: float, value: int = 0
) -> ProposedChange:
    """Return a change that saves so many seconds of a step; the interval grows with the measurements' difference."""
    shares = (max(0.0, seconds) / step.seconds for seconds in (min(lower, saved), saved, max(upper, saved)))
    low, gain, high = (min(share, 0.99) for share in shares)
    return ProposedChange(
        kind, action, gain, low * (1 - step.difference), min(high * (1 + step.difference), 0.99), value
    )


def _transfer_by_bytes(step: MeasuredStep) -> tuple[float, float]:
    """Return the least and the most time of the exchange that depends on its bytes, and not on its messages."""
    if step.hosts > 1:
        buckets = 1 + math.ceil(step.facts.gradient_bytes / BUCKET_BYTES)
        return max(0.0, step.transfer - BUCKET_SECONDS * buckets), step.transfer
    return 0.0, min(step.transfer, step.wire_bytes / (HOST_RATE if step.is_on_cpu else GPU_HOST_RATE))


def _compressions(step: MeasuredStep) -> Iterator[ProposedChange]:
    facts, (least, most) = step.facts, _transfer_by_bytes(step)
    if facts.exchange not in COMPRESS or facts.element_bytes != 4:
        return
    cost = (CAST_SECONDS if step.is_on_cpu else GPU_SECONDS) * facts.gradient_bytes
    slowed = step.slowed_backward
    overlap = min(most, step.of("backward")) / 4  # the shorter exchange may overlap more of the backward pass
    action = COMPRESS[facts.exchange]
    yield _change(step, "compress", action, (most + slowed) / 2 - cost, least / 2 - 3 * cost, most / 2 + overlap)
    if facts.exchange == "ddp" and facts.gradient_bytes >= MIN_POWERSGD_BYTES:
        cost = (POWERSGD_SECONDS / max(facts.threads, 1) if step.is_on_cpu else GPU_SECONDS) * facts.gradient_bytes
        least, most = ((1 - POWERSGD_SHARE) * seconds for seconds in (least, most))
        upper, action = most + slowed - cost / 3, POWERSGD
        if step.is_on_cpu:  # Gloo matches collectives by their order, which differs with several buckets in flight
            action += f", in one bucket: bucket_cap_mb={math.ceil(facts.gradient_bytes / 1e6) + 1}"
        yield _change(step, "powersgd", action, most + slowed - cost, least - 2 * cost, upper)


def _larger_batch(step: MeasuredStep) -> ProposedChange:
    """Several passes per exchange save at least its time; a larger batch also what each pass takes for any batch."""
    share, fixed = 1 - 1 / PASSES, step.fixed_seconds
    once = step.transfer + step.of("optimizer")
    kind, action = "accumulate", f"accumulate {PASSES} passes per exchange, or use {PASSES} times the batch"
    saved = once + step.slowed_backward
    if fixed > 0.5 * step.of("forward", "backward"):
        kind, action, saved = "batch", f"{PASSES} times the batch per worker", saved + fixed
    overlap = min(step.of("backward"), 2 * step.transfer)  # at most, of an exchange that slows the backward pass
    most = max(saved, once + 1.5 * fixed) + overlap
    action += ", with a learning rate to match"
    return _change(step, kind, action, share * saved, share * (once + 0.3 * fixed), share * most, PASSES)


def _loader_processes(step: MeasuredStep) -> ProposedChange | None:
    """More loader processes use the cores that are idle now, and hide all loading if these suffice."""
    facts, waits = step.facts, step.data_wait
    is_known = 0 <= facts.loader_processes < MAX_PROCESSES and facts.cores
    if not is_known or facts.free_cores < MIN_FREE_CORES or waits < WORTH * step.seconds:
        return None
    rest = max(step.seconds - waits, 0.05 * step.seconds)
    work = facts.loader_processes * step.seconds or waits  # of one process for a batch
    processes = max(facts.loader_processes + 1, min(math.ceil(1.25 * work / rest), MAX_PROCESSES))
    saved = min(waits - max(0.0, work / processes - rest), facts.free_cores / facts.cores * step.seconds)
    action = f"num_workers={processes} for the DataLoader instead of {facts.loader_processes}"
    return _change(step, "loader", action, 0.95 * saved, 0.6 * saved, waits, processes)


def _threads(step: MeasuredStep) -> ProposedChange | None:
    """One thread per core is best; additional ones need cores that are idle."""
    facts, computing = step.facts, step.of(*COMPUTE)
    if not (step.is_on_cpu and facts.threads and facts.local_workers and facts.cores):
        return None
    threads = max(1, facts.cores // facts.local_workers)
    if threads < facts.threads:
        saved = 1 - (facts.cores / (facts.threads * facts.local_workers)) ** SHARED_CORES
        shares = 0.1 * saved, saved, min(1.0, 1.5 * saved)
    else:
        threads = int(min(threads, facts.threads + facts.free_cores / facts.local_workers + 0.25))
        computing -= step.fixed_seconds + step.of("optimizer")
        rest = facts.threads / max(threads, 1)
        shares = 1 - rest**0.25, (1 - SERIAL_SHARE) * (1 - rest), 1 - rest
    least, saved, most = (share * computing for share in shares)
    action = f"OMP_NUM_THREADS={threads} instead of {facts.threads}"
    return _change(step, "threads", action, saved, least, most, threads)


def _relieve(step: MeasuredStep, slow: SlowRank) -> ProposedChange:
    """Return smaller shares of the batch for a rank that computes slowly; else less of its additional work."""
    if slow.phase not in COMPUTE[:2]:
        action = f"remove what rank {slow.rank} alone spends {slow.where}"
        return _change(step, "slow worker", action, slow.seconds, 0.8 * slow.seconds, slow.seconds)
    own = step.own
    saved = max(own) - len(own) / sum(1 / max(each, 1e-9) for each in own)
    action = "batches by the workers' speeds (--balance; in own loops world.loader(..., balance=True))"
    return _change(step, "balance", action, saved, 0.7 * saved, slow.seconds)


def untested_changes(bound: str, step: MeasuredStep, config: TrainConfig | None) -> list[ProposedChange]:
    """Return changes that only a trial can judge, because no record shows what they save.

    Args:
        bound: What bounds the step.
        config: Of a run of `lockstep train`.
    """
    found, processes = [], step.facts.loader_processes + 2
    if bound in ("computing", "small batch") and config:
        if not config.model.channels_last:
            found.append(ProposedChange("channels_last", "images in the NHWC memory format (--channels-last)"))
        if not config.model.compile:
            found.append(ProposedChange("compile", "torch.compile (--compile)"))
    if bound == "data" and processes > 1:
        found.append(ProposedChange("loader", f"num_workers={processes} for the DataLoader", value=processes))
    if bound == "data" and not config and not step.is_on_cpu:
        found.append(ProposedChange("pin_memory", "pin_memory=True for the DataLoader"))
    return found


def percent(share: float) -> str:
    """Return a share for users."""
    return f"{100 * share:.0f} %"
