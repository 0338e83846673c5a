"""Whether the workers train one model: their weights, gradients and optimizer settings, compared step by step.

Only what should be equal is compared: parameters that DistributedDataParallel manages, and those that were equal on all
workers before the first step. Parts of sharded parameters differ by design, as do parameters that each worker keeps for
itself. Weights that become equal again and again are averaged from time to time, as local SGD does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from lockstep.errors import plural
from lockstep.script_check.answers import Finding, Record, Records, Verdict, are_equal, events, ranks

SAME_START = "the workers begin with the same weights"
SAME_WEIGHTS = "the weights stay equal after each step"
SAME_SETTINGS = "the optimizers have the same settings"
ONE_MEAN = "gradients are averaged once"
SAME_AVERAGES = "batch norm's running averages that are saved are of all workers"
QUESTIONS = (SAME_START, SAME_WEIGHTS, SAME_SETTINGS, ONE_MEAN)
MIN_STEPS = 3  # whose gradients have the wrong scale
SCALE_ERROR = 0.01
WRAP = "wrap the model: model = DistributedDataParallel(model)"
BEGIN = "load or initialize the same weights on each worker, such as torch.manual_seed(0) before the model is made"


@dataclass(frozen=True)
class Trained:
    """One optimizer, on all workers.

    Args:
        made: The record of its first step, by worker.
        steps: Its steps, by worker.
        places: The parameters that should be equal.
        local: The names of those that each worker keeps for itself.
        is_averaged: Whether weights that differ have become equal again, as with local SGD.
    """

    workers: Sequence[int]
    made: Sequence[Record]
    steps: Sequence[Sequence[Record]]
    places: Sequence[int]
    local: Sequence[str]
    is_averaged: bool

    @property
    def common(self) -> int:
        """The number of steps that all workers have taken."""
        return min(map(len, self.steps))

    def weights(self, step: int) -> list[list[str]]:
        """The compared weights after a step, by worker."""
        return [[own[step]["weights"][place] for place in self.places] for own in self.steps]

    def gradients(self, worker: int, step: int) -> list[Any]:
        return [self.steps[worker][step]["gradients"][place] for place in self.places]

    def is_exchanged(self, step: int) -> bool:
        """Whether all workers took the step with the same gradients."""
        found = [self.gradients(worker, step) for worker in range(len(self.workers))]
        return are_equal(found) and any(each is not None for each in found[0])

    def name(self, place: int) -> str:
        return str(self.made[0]["names"][place])


def are_replicas(records: Records) -> bool:
    """Whether the workers train replicas of one model, whole or sharded, and not parts of it.

    Models in parts have replicated parameters, too, such as those of norms between the layers that are split.
    """
    return any(
        each.made[0]["has_shards"] or (each.places and not each.local and not any(each.made[0]["sharded"]))
        for each in _optimizers(records)
    )


def judge_replicas(records: Records) -> list[Finding]:
    """Answer `QUESTIONS`, each by the first optimizer for which the answer is "no"."""
    found: dict[str, list[Finding]] = {question: [] for question in QUESTIONS}
    for trained in _optimizers(records):
        for answer in (_same_start(trained), _same_weights(trained), _same_settings(trained), _one_mean(trained)):
            found[answer.question].append(answer)
    silent = [rank for rank, own in events(records, "step").items() if not own]
    unseen = f"{ranks(silent)} took no step of an optimizer" if silent else "the workers train different parameters"
    answers = [_worst(each) or Finding(question, "not seen", unseen) for question, each in found.items()]
    return [*answers, _same_averages(records)]


def _worst(answers: Sequence[Finding]) -> Finding | None:
    order: tuple[Verdict, ...] = ("no", "hint", "yes", "not seen")
    return min(answers, key=lambda answer: order.index(answer.verdict), default=None)


def _optimizers(records: Records) -> Iterator[Trained]:
    made, steps = events(records, "optimizer"), events(records, "step")
    if len(made) < 2:
        return
    for number in range(min(map(len, made.values()))):
        of = [own[number] for own in made.values()]
        if not are_equal([(each["names"], each["shapes"]) for each in of]):
            continue  # each worker trains another part of the model
        taken = [[step for step in own if step["optimizer"] == number] for own in steps.values()]
        places: list[int] = []
        local: list[int] = []
        for place in range(len(of[0]["names"])):
            if any(each["sharded"][place] for each in of):
                continue
            began_equal = are_equal([each["weights"][place] for each in of])
            (places if began_equal or of[0]["managed"][place] else local).append(place)
        if all(_is_reduced(taken, place) for place in local) or (not places and _trains_alone(of, taken)):
            places, local = sorted([*places, *local]), []
        names = [of[0]["names"][place] for place in local]
        yield Trained(tuple(made), of, taken, places, names, _is_averaged(of[0], made, steps))


def _is_reduced(steps: Sequence[Sequence[Record]], place: int) -> bool:
    """Whether all workers change a parameter by the same gradients, which are not constant."""
    rows = [[step["gradients"][place] for step in row] for row in zip(*steps, strict=False)]
    return all(map(are_equal, rows)) and len({row[0] for row in rows} - {None}) > 1


def _is_averaged(made: Record, all_made: Mapping[int, Sequence[Record]], steps: Mapping[int, Sequence[Record]]) -> bool:
    """Whether differing weights became equal again before a later step, of this or another optimizer over them."""
    alike = {each["optimizer"] for own in all_made.values() for each in own if each["names"] == made["names"]}
    have_differed = False
    for row in zip(*([step for step in own if step["optimizer"] in alike] for own in steps.values()), strict=False):
        if have_differed and are_equal([step["before"] for step in row]):
            return True
        have_differed |= not are_equal([step["weights"] for step in row])
    return False


def _trains_alone(made: Sequence[Record], steps: Sequence[Sequence[Record]]) -> bool:
    """Whether nothing was exchanged in any step, or whole gradients were: not of a model in parts."""
    exchanged = any(step["exchanges"] for own in steps for step in own) or made[0]["has_hvd"]
    equal = any(are_equal([step["gradients"] for step in row]) for row in zip(*steps, strict=False))
    return not exchanged or equal


def _same_start(trained: Trained) -> Finding:
    if not trained.places:
        return Finding(SAME_START, "not seen", "each worker has its own part of the weights")
    unequal = [place for place in trained.places if not are_equal([made["weights"][place] for made in trained.made])]
    if unequal:
        count = f"{len(unequal)} of {len(trained.places)} parameters differ before the first step"
        return Finding(SAME_START, "no", f"{count}, first {trained.name(unequal[0])}", trained.made[0]["line"], BEGIN)
    own = f"; {len(trained.local)} more are each worker's own, first {trained.local[0]}" if trained.local else ""
    return Finding(SAME_START, "yes", f"{len(trained.places)} parameters{own}")


def _same_weights(trained: Trained) -> Finding:
    if not trained.places or not trained.common:
        return Finding(SAME_WEIGHTS, "not seen", "no weights that should be equal were trained")
    equal = [are_equal(trained.weights(step)) for step in range(trained.common)]
    exchanged = any(trained.is_exchanged(step) for step in range(trained.common))
    if exchanged and not are_equal([[made["weights"][place] for place in trained.places] for made in trained.made]):
        return Finding(SAME_WEIGHTS, "not seen", "they differ before the first step")
    if all(equal):
        return Finding(SAME_WEIGHTS, "yes", plural(trained.common, "step"))
    first = equal.index(False)
    if trained.made[0]["has_local_sgd"] and not trained.is_averaged:
        text = f"the program averages them from time to time, but not within {plural(trained.common, 'step')}"
        return Finding(SAME_WEIGHTS, "not seen", text)
    if trained.is_averaged:
        return Finding(SAME_WEIGHTS, "yes", "from time to time: they differ after some steps, and are averaged later")
    after = zip(trained.places, zip(*trained.weights(first), strict=True), strict=True)
    place = next(place for place, weights in after if not are_equal(weights))
    why, where, fix = _why(trained, first, place)
    return Finding(SAME_WEIGHTS, "no", f"from step {first + 1} on, first {trained.name(place)}: {why}", where, fix)


class Reason(NamedTuple):
    """Why weights differ: a sentence, the script's line, and what to change."""

    text: str
    where: str
    fix: str


def _why(trained: Trained, step: int, place: int) -> Reason:
    """Return why a parameter differs after a step."""
    where = trained.steps[0][step]["line"]
    if not any(made["joined"] for made in trained.made):
        text = "the workers have no process group: each trains a model of its own"
        return Reason(text, where, f"call torch.distributed.init_process_group() in each worker, and {WRAP}")
    if shifted := _shifted(trained, step):
        return shifted
    settings = _settings_at(trained, step)
    if not are_equal(settings):
        text = f"the settings differ: {_difference(settings)}"
        return Reason(text, where, "set the optimizer from values that are equal on all workers")
    if not trained.is_exchanged(step):
        return _why_not_exchanged(trained, step, place)
    if step and not are_equal([own[step]["before"] for own in trained.steps]):
        text = "the weights were changed outside of the optimizer before the step"
        return Reason(text, where, "change weights equally on each worker, or broadcast them")
    text = "the gradients are equal, but the optimizers' states differ"
    return Reason(text, where, "load or broadcast the optimizer's state on each worker")


def _why_not_exchanged(trained: Trained, step: int, place: int) -> Reason:
    """Return why the gradient of a parameter differs."""
    rows = [own[step] for own in trained.steps]
    bare = next((row["bare_call"] for row in rows if row["bare_call"]), "")
    alone = next((row["no_sync"] for row in rows if row["no_sync"]), "")
    if bare:
        text = "the loss bypasses DistributedDataParallel: the inner module is called"
        return Reason(text, bare, "call the wrapped model instead of its .module")
    if alone:
        text = "its gradients were computed within no_sync() only, so they are not averaged"
        return Reason(text, alone, "leave no_sync() for the last backward pass before each step")
    if not trained.made[0]["has_wrapper"]:
        return Reason("gradients are not averaged over the workers", rows[0]["line"], WRAP)
    if not trained.made[0]["managed"][place]:
        text = "the parameter is not managed by DistributedDataParallel: it was added after wrapping"
        return Reason(text, rows[0]["line"], "complete the model before it is wrapped")
    return Reason("its gradients differ", rows[0]["line"], "use the wrapped model's output in the loss, on each worker")


def _shifted(trained: Trained, step: int) -> Reason | None:
    """Return the reason if a worker has skipped or repeated a step that the others took."""
    for one, other in ((one, other) for one in range(len(trained.workers)) for other in range(len(trained.workers))):
        if one == other or step + 1 >= len(trained.steps[other]):
            continue
        own, following = trained.gradients(one, step), trained.gradients(other, step + 1)
        if own == trained.gradients(other, step) or own != following or not any(own):
            continue
        line = trained.steps[one][step]["line"]
        if step and trained.gradients(other, step) == trained.gradients(other, step - 1):
            text = f"worker {trained.workers[other]} took step {step + 1} a second time, alone"
            line = trained.steps[other][step]["line"]
            return Reason(text, line, "call the optimizer's step equally often on each worker")
        text = f"worker {trained.workers[one]} skipped step {step + 1}, which the others took"
        return Reason(text, line, "decide on all workers together, for example by an all_reduce of the condition")
    return None


def _settings_at(trained: Trained, step: int) -> list[Any]:
    """Return the settings of each worker's optimizer in a step; they are recorded where they change."""
    return [
        next((each["settings"] for each in reversed(own[: step + 1]) if each["settings"] is not None), None)
        for own in trained.steps
    ]


def _same_settings(trained: Trained) -> Finding:
    for step in range(trained.common):
        if are_equal([own[step]["settings"] for own in trained.steps]):
            continue
        settings = _settings_at(trained, step)
        if not are_equal(settings):
            fix = "compute learning rates from values that all workers share, such as an all-reduced metric"
            detail = f"from step {step + 1} on: {_difference(settings)}"
            return Finding(SAME_SETTINGS, "no", detail, trained.steps[0][step]["line"], fix)
    return Finding(SAME_SETTINGS, "yes" if trained.common else "not seen", plural(trained.common, "step"))


def _difference(settings: Sequence[Any]) -> str:
    """Return the first setting that differs, with its value on each worker."""
    for groups in zip(*settings, strict=False):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if not are_equal(values):
                return f"{name} is {', '.join(map(str, values))} on {ranks(range(len(values)))}"
    return "the numbers of parameter groups differ"


def _one_mean(trained: Trained) -> Finding:
    """Compare gradients with the mean of those of each worker, where a script averages them by itself."""
    workers = len(trained.workers)
    scales = []
    for step in range(trained.common):
        rows = [own[step] for own in trained.steps]
        local = [row["local"] for row in rows]
        is_own = (
            None not in local and not are_equal(local) and all(row["is_mean"] and row["losses"] == 1 for row in rows)
        )
        mean = sum(local) / workers if is_own else 0.0
        if mean and trained.is_exchanged(step):
            scales.append(rows[0]["projection"] / mean)
    if not scales:
        exchanged = any(trained.is_exchanged(step) for step in range(trained.common))
        by = "by DistributedDataParallel or hvd" if exchanged else "no own averaging of gradients was seen"
        return Finding(ONE_MEAN, "yes" if exchanged else "not seen", by)
    scale, where = median(scales), trained.steps[0][0]["line"]
    for wrong, text, fix in (
        (float(workers), "they are the workers' sum", f"divide them by the number of workers, {workers}"),
        (1 / workers, "they are divided twice", "divide them by the number of workers only once"),
    ):
        if len(scales) >= MIN_STEPS and all(abs(each / wrong - 1) < SCALE_ERROR for each in scales):
            return Finding(ONE_MEAN, "no", f"{text}: {scale:.3g} times the mean", where, fix)
    return Finding(ONE_MEAN, "yes", f"{scale:.3g} times the mean, in {len(scales)} steps")


def _same_averages(records: Records) -> Finding:
    """Compare running averages after the last step before they are saved, unless the program has changed them since."""
    rows = list(zip(*events(records, "step").values(), strict=False))
    compared = False
    for last, following in pairwise(rows):
        for own, step in zip(last, following, strict=True):
            where, saved = step["saved"]
            compared |= bool(where)
            if where and saved == own["averages"] and not are_equal([other["averages"] for other in last]):
                fix = "use SyncBatchNorm, or average the buffers of all workers before they are saved"
                return Finding(SAME_AVERAGES, "hint", "each worker averages over its own batches", where, fix)
    return Finding(SAME_AVERAGES, "yes" if compared else "not seen", "" if compared else "none were saved")
