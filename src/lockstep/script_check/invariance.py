"""Whether several workers train as one does with the same global batch: their first losses, compared.

Losses are compared as long as the global batches have the same samples, from the same first weights. Rounding errors
grow from step to step, and are small beside what the losses themselves do: differ between workers, and change.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lockstep.errors import plural
from lockstep.script_check.answers import Finding, Record, Records, events, rows_of

SAME_LOSSES = "the first losses are those of one worker"
SHARE = 0.1  # of what the losses differ between workers and change over the steps: more is not rounding
ROUNDING = 1e-4  # of a loss, from 32-bit numbers
COARSE_ROUNDING = 1e-2  # from 16-bit numbers
STEPS = 20  # of the job with one worker


def judge_invariance(alone: Records, records: Records) -> Finding:
    """Compare the records of one worker with those of several, with the same samples per step."""
    single = next(iter(alone.values()))
    steps = rows_of(events(records, "step").values())
    pairs = list(zip((step for step in single if step["event"] == "step"), steps, strict=False))
    first = [next((each for each in own if each["event"] == "optimizer"), None) for own in (single, records[0])]
    if first[0] is None or first[1] is None or not pairs:
        return Finding(SAME_LOSSES, "not seen", "a job took no step of an optimizer")
    if any(first[1]["sharded"]):
        return Finding(SAME_LOSSES, "not seen", "each worker has its own part of the weights")
    if (first[0]["names"], first[0]["weights"]) != (first[1]["names"], first[1]["weights"]):
        return Finding(SAME_LOSSES, "not seen", "each start of the script has other weights: seed them")
    known = 0
    while known < len(pairs) and not _why_other(*pairs[known]):
        known += 1
    if not known:
        return Finding(SAME_LOSSES, "not seen", _why_other(*pairs[0]))
    return _compare(pairs[:known], first[1]["has_wrapper"])


def _why_other(one: Record, row: Sequence[Record]) -> str:
    """Return why the losses of a step cannot be compared; "" if they can."""
    if any(step["loss"] is None or not step["inputs"] for step in (one, *row)):
        return "losses and samples were not seen"
    if any(step["is_random"] for step in (one, *row)):
        return "the model draws random numbers, such as for dropout: set it to 0"
    if any(step["has_batch_norm"] for step in (one, *row)):
        return "batch norm takes its statistics from the batch of each worker, which depend on its size"
    if sorted(one["inputs"]) != sorted(sample for step in row for sample in step["inputs"]):
        return "other samples, or randomly changed ones, are in the first batches: read them in a fixed order"
    return ""


def _compare(pairs: Sequence[tuple[Record, Sequence[Record]]], has_wrapper: bool) -> Finding:
    alone = [float(one["loss"]) for one, _ in pairs]
    rows = [[float(step["loss"]) for step in row] for _, row in pairs]
    workers = len(rows[0])
    together = [fmean(row) for row in rows]
    if not has_wrapper and abs(sum(rows[0]) - alone[0]) < abs(together[0] - alone[0]):  # each worker's part of the mean
        together = [sum(row) for row in rows]
    spread = max(max(values) - min(values) for values in (alone, *rows))
    rounding = COARSE_ROUNDING if any(one["is_rounded"] for one, _ in pairs) else ROUNDING
    apart = [abs(one - other) for one, other in zip(alone, together, strict=True)]
    for number, error in enumerate(apart):
        if error > max(SHARE * spread, rounding * abs(alone[number])):
            losses = f"{alone[number]:.6g} with one worker, {together[number]:.6g} with {workers}"
            where, fix = pairs[number][1][0]["line"], _fix(number, *pairs[0])
            return Finding(SAME_LOSSES, "no", f"the loss of step {number + 1} is {losses}", where, fix)
    return Finding(SAME_LOSSES, "yes", f"{plural(len(pairs), 'step')}, at most {max(apart):.2g} apart")


def _fix(number: int, one: Record, row: Sequence[Record]) -> str:
    """Return what to change if the losses differ after `number` equal steps, by the first step of both jobs."""
    if number == 0:
        return "use the mean of a batch as the loss, not a sum, and weigh all samples of all workers equally"
    for alone, group in zip(one["settings"], row[0]["settings"], strict=False):
        for name in alone:
            if alone[name] != group.get(name):
                text = f"{name} is {alone[name]} with one worker and {group.get(name)} with {len(row)}"
                return f"{text}: let it depend on the global batch only"
    return "average the gradients of all workers"
