"""Whether the workers train one model: their weights, gradients and optimizer settings, compared step by step.

Only what should be equal is compared: parameters that DistributedDataParallel manages, and those that were equal on all
workers before the first step. Parts of sharded parameters differ by design, as do parameters that each worker keeps for
itself. Weights that become equal again and again are averaged from time to time, as local SGD does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from statistics import median
from typing import Any

from lockstep.errors import plural
from lockstep.script_check.answers import Finding, Record, Records, Verdict, are_equal, events, ranks, rows_of

SAME_START = "the workers begin with the same weights"
SAME_WEIGHTS = "the weights stay equal after each step"
SAME_SETTINGS = "the optimizers have the same settings"
ONE_MEAN = "gradients are averaged once"
SAME_AVERAGES = "batch norm's running averages that are saved are of all workers"
ONE_WRITER = "each file is saved by one worker"
SAME_MODE = "the models are in the same mode, of training or evaluation"
QUESTIONS = (SAME_START, SAME_WEIGHTS, SAME_SETTINGS, ONE_MEAN)
MIN_STEPS = 3  # whose gradients have the wrong scale
SCALE_ERROR = 0.01
MAKE_LATER = "make the optimizer of the model that computes the loss, after fully_shard() has replaced its parameters"
TOGETHER = "decide on all workers together, for example by an all_reduce of the condition"
ONCE = "divide the sum of the workers' gradients by their number, once; DistributedDataParallel has done so"
WRAP = "wrap the model: model = DistributedDataParallel(model)"
LOAD = "load them on each worker, or by set_model_state_dict() with broadcast_from_rank0=True"
BEGIN = "load or initialize the same weights on each worker, such as torch.manual_seed(0) before the model is made"


@dataclass(frozen=True)
class Trained:
    """One optimizer, on all workers.

    Args:
        made: The record of its first step, by worker.
        steps: The records of each step that all workers have taken, by worker.
        places: The parameters that should be equal.
        local: The names of those that each worker keeps for itself.
        is_averaged: Whether weights that differ have become equal again, as with local SGD.
        taken: How many steps each worker has taken.
    """

    made: Sequence[Record]
    steps: Sequence[Sequence[Record]]
    places: Sequence[int]
    local: Sequence[str]
    is_averaged: bool
    taken: Sequence[int]

    @property
    def is_idle(self) -> bool:
        """Whether no parameter has had a gradient, or another value, in any step, in spite of backward passes."""
        pairs = [pair for row in self.steps for pair in zip(self.made, row, strict=True)]
        has_any = any(each is not None for _, step in pairs for each in step["gradients"])
        stays = all(step["weights"] == made["weights"] for made, step in pairs)
        is_long = len(self.steps) >= MIN_STEPS and any(step["losses"] for _, step in pairs)
        return is_long and stays and not has_any and not any(self.made[0]["sharded"])

    def gradients(self, record: Record) -> list[Any]:
        """Return a worker's gradients that should be equal."""
        return [record["gradients"][place] for place in self.places]

    def different(self, row: Sequence[Record], what: str = "weights") -> list[int]:
        """Return the places of those that differ between the workers."""
        return [place for place in self.places if not are_equal([each[what][place] for each in row])]

    def is_exchanged(self, row: Sequence[Record]) -> bool:
        """Whether all workers took a step with the same gradients."""
        has_any = any(each is not None for each in self.gradients(row[0]))
        return has_any and not self.different(row, "gradients")

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
    optimizers = list(_optimizers(records))
    silent = [rank for rank, own in events(records, "step").items() if not own]
    unseen = f"{ranks(silent)} took no step of an optimizer" if silent else "the workers train different parameters"
    order: tuple[Verdict, ...] = ("no", "hint", "yes", "not seen")
    answers = []
    for question, judge in zip(QUESTIONS, (_same_start, _same_weights, _same_settings, _one_mean), strict=True):
        found = [judge(each) for each in optimizers] or [Finding(question, "not seen", unseen)]
        answers.append(min(found, key=lambda answer: order.index(answer.verdict)))
    if optimizers and all(each.is_idle for each in optimizers):
        text = f"nothing is trained: no parameter of an optimizer had a gradient in {len(optimizers[0].steps)} steps"
        answers[1] = Finding(SAME_WEIGHTS, "no", text, optimizers[0].made[0]["line"], MAKE_LATER)
    return [*answers, _same_mode(records), _same_averages(records), _one_writer(records)]


def _optimizers(records: Records) -> Iterator[Trained]:
    made, steps = events(records, "optimizer"), events(records, "step")
    for number, of in enumerate(zip(*made.values(), strict=False) if len(made) > 1 else ()):
        if not are_equal([(each["names"], each["shapes"]) for each in of]):
            continue  # each worker trains another part of the model
        by_worker = [[step for step in own if step["optimizer"] == number] for own in steps.values()]
        taken = rows_of(by_worker)
        whole = [place for place in range(len(of[0]["names"])) if not any(each["sharded"][place] for each in of)]
        began = Trained(of, taken, whole, (), False, [*map(len, by_worker)])
        local = [place for place in began.different(of) if not of[0]["managed"][place]]
        if all(_is_reduced(taken, place) for place in local) or (local == whole and _trains_alone(of, taken)):
            local = []
        places, names = [place for place in whole if place not in local], [began.name(place) for place in local]
        yield replace(began, places=places, local=names, is_averaged=_is_averaged(of[0], made, steps))


def _is_reduced(steps: Sequence[Sequence[Record]], place: int) -> bool:
    """Whether all workers change a parameter by the same gradients, which are not constant."""
    rows = [[step["gradients"][place] for step in row] for row in steps]
    return all(map(are_equal, rows)) and len({row[0] for row in rows} - {None}) > 1


def _is_averaged(made: Record, all_made: Mapping[int, Sequence[Record]], steps: Mapping[int, Sequence[Record]]) -> bool:
    """Whether differing weights became equal again before a later step, of this or another optimizer over them."""
    alike = {each["optimizer"] for own in all_made.values() for each in own if each["names"] == made["names"]}
    have_differed = False
    for row in rows_of([[step for step in own if step["optimizer"] in alike] for own in steps.values()]):
        if have_differed and are_equal([step["before"] for step in row]):
            return True
        have_differed |= not are_equal([step["weights"] for step in row])
    return False


def _trains_alone(made: Sequence[Record], steps: Sequence[Sequence[Record]]) -> bool:
    """Whether nothing was exchanged in any step, or whole gradients were: not of a model in parts."""
    exchanged = any(step["exchanges"] for row in steps for step in row) or made[0]["has_hvd"]
    return not exchanged or any(are_equal([step["gradients"] for step in row]) for row in steps)


def _same_start(trained: Trained) -> Finding:
    if not trained.places:
        return _loaded_alone(trained) or Finding(SAME_START, "not seen", "each worker has its own part of the weights")
    if unequal := trained.different(trained.made):
        count = f"{len(unequal)} of {len(trained.places)} parameters differ before the first step"
        return Finding(SAME_START, "no", f"{count}, first {trained.name(unequal[0])}", trained.made[0]["line"], BEGIN)
    own = f"; {len(trained.local)} more are each worker's own, first {trained.local[0]}" if trained.local else ""
    return Finding(SAME_START, "yes", f"{len(trained.places)} parameters{own}")


def _loaded_alone(trained: Trained) -> Finding | None:
    """Return the finding if some workers loaded weights and the others neither did so nor got copies."""
    loaded = [made for made in trained.made if made["loaded"]]
    if not loaded or not loaded[0]["has_shards"] or all(made["loaded"] or made["copies"] for made in trained.made):
        return None
    text = f"only {ranks([made['rank'] for made in loaded])} loaded weights, and each worker has its own part of them"
    return Finding(SAME_START, "no", text, loaded[0]["loaded"], LOAD)


def _same_weights(trained: Trained) -> Finding:
    if trained.made[0]["has_shards"] and (skipped := _skipped_shards(trained)):
        return skipped
    if not trained.places or not trained.steps:
        return Finding(SAME_WEIGHTS, "not seen", "no weights that should be equal were trained")
    if trained.different(trained.made) and any(map(trained.is_exchanged, trained.steps)):
        return Finding(SAME_WEIGHTS, "not seen", "they differ before the first step")
    first = next((number for number, row in enumerate(trained.steps) if trained.different(row)), None)
    if first is None:
        return Finding(SAME_WEIGHTS, "yes", plural(len(trained.steps), "step"))
    if trained.is_averaged:
        return Finding(SAME_WEIGHTS, "yes", "from time to time: they differ after some steps, and are averaged later")
    if len({*trained.taken}) > 1 and any(each["joins"] for row in trained.steps for each in row):
        return Finding(SAME_WEIGHTS, "not seen", f"from step {first + 1} on: of other batches, within join()")
    if trained.made[0]["has_local_sgd"]:
        text = f"the program averages them from time to time, but not within {plural(len(trained.steps), 'step')}"
        return Finding(SAME_WEIGHTS, "not seen", text)
    place = trained.different(trained.steps[first])[0]
    why, where, fix = _why(trained, first, place)
    return Finding(SAME_WEIGHTS, "no", f"from step {first + 1} on, first {trained.name(place)}: {why}", where, fix)


def _skipped_shards(trained: Trained) -> Finding | None:
    """Return the step that a worker has skipped with its part of the weights: it made more backward passes for one."""
    for number, row in enumerate(trained.steps, start=1):
        passes = [each["losses"] for each in row]
        rank = max(range(len(row)), key=passes.__getitem__)
        if not are_equal(passes) and trained.taken[rank] < max(trained.taken):
            text = f"worker {rank} skipped step {number}, which the others took with their parts of the weights"
            return Finding(SAME_WEIGHTS, "no", text, row[rank]["line"], TOGETHER)
    return None


def _why(trained: Trained, number: int, place: int) -> tuple[str, str, str]:
    """Return why a parameter differs after a step, the script's line, and what to change."""
    row, made = trained.steps[number], trained.made[0]
    line = row[0]["line"]
    bare = next((each["bare_call"] for each in row if each["bare_call"]), "")
    alone = next((each["no_sync"] for each in row if each["no_sync"]), "")
    if not any(each["joined"] for each in trained.made):
        text = "the workers have no process group: each trains a model of its own"
        return text, line, f"call torch.distributed.init_process_group() in each worker, and {WRAP}"
    if shifted := _shifted(trained, number):
        return shifted
    if not are_equal(settings := [each["settings"] for each in row]):
        text = f"the settings differ: {_difference(settings)}"
        return text, line, "set the optimizer from values that are equal on all workers"
    if trained.is_exchanged(row):
        if number and not are_equal([each["before"] for each in row]):
            text = "the weights were changed outside of the optimizer before the step"
            return text, line, "change weights equally on each worker, or broadcast them"
        text = "the gradients are equal, but the optimizers' states differ"
        return text, line, "load or broadcast the optimizer's state on each worker"
    if bare:
        text = "the loss bypasses DistributedDataParallel: the inner module is called"
        return text, bare, "call the wrapped model instead of its .module"
    if alone:
        text = "its gradients were computed within no_sync() only, so they are not averaged"
        return text, alone, "leave no_sync() for the last backward pass before each step"
    if not made["has_wrapper"]:
        return "gradients are not averaged over the workers", line, WRAP
    if not made["managed"][place]:
        text = "the parameter is not managed by DistributedDataParallel: it was added or unfrozen after wrapping"
        return text, line, "complete the model before it is wrapped; after unfreezing, wrap it again"
    fix = "use the wrapped model's whole output in the loss, on each worker, or pass find_unused_parameters=True"
    return "its gradients differ", line, fix


def _shifted(trained: Trained, number: int) -> tuple[str, str, str] | None:
    """Return the reason if a worker has skipped or repeated a step that the others took."""
    if number + 1 == len(trained.steps):
        return None
    rows = (trained.steps[each] for each in (max(number - 1, 0), number, number + 1))
    before, now, following = ([trained.gradients(each) for each in row] for row in rows)
    for one, other in permutations(range(len(now)), 2):
        if now[one] == now[other] or now[one] != following[other] or not any(now[one]):
            continue
        record = trained.steps[number][one]
        if number and now[other] == before[other]:
            record = trained.steps[number][other]
            text = f"worker {record['rank']} took step {number + 1} a second time, alone"
            return text, record["line"], "call the optimizer's step equally often on each worker"
        text = f"worker {record['rank']} skipped step {number + 1}, which the others took"
        return text, record["line"], TOGETHER
    return None


def _same_settings(trained: Trained) -> Finding:
    for number, row in enumerate(trained.steps, start=1):
        settings = [each["settings"] for each in row]
        if not are_equal(settings):
            fix = "compute learning rates from values that all workers share, such as an all-reduced metric"
            detail = f"from step {number} on: {_difference(settings)}"
            return Finding(SAME_SETTINGS, "no", detail, row[0]["line"], fix)
    return Finding(SAME_SETTINGS, "yes" if trained.steps else "not seen", plural(len(trained.steps), "step"))


def _difference(settings: Sequence[Any]) -> str:
    """Return the first setting that differs, with its value on each worker."""
    for groups in zip(*settings, strict=False):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if not are_equal(values):
                return f"{name} is {', '.join(map(str, values))} on {ranks(range(len(values)))}"
    return "the numbers of parameter groups differ"


def _one_mean(trained: Trained) -> Finding:
    """Compare gradients with the mean of those that each worker's backward pass has left, averaged or not."""
    workers, scales, made, is_own = len(trained.made), [], trained.made[0], False
    exchanged = list(filter(trained.is_exchanged, trained.steps))
    for row in exchanged:
        local = [each["local"] for each in row]
        if None not in local and sum(local) and all(each["is_mean"] and each["losses"] == 1 for each in row):
            scales.append(row[0]["projection"] / sum(local) * workers)
            is_own |= not are_equal(local)  # else the backward pass has averaged them
    scale, where = median(scales or [0.0]), trained.steps[0][0]["line"] if trained.steps else ""
    for wrong, text in ((float(workers), "they are the workers' sum"), (1 / workers, "they are divided twice")):
        if len(scales) >= MIN_STEPS and all(abs(each / wrong - 1) < SCALE_ERROR for each in scales):
            return Finding(ONE_MEAN, "no", f"{text}: {scale:.3g} times the mean", where, ONCE)
    if is_own:  # other scales may come from clipping
        is_mean = abs(scale - 1) < SCALE_ERROR
        return Finding(
            ONE_MEAN, "yes" if is_mean else "not seen", f"{scale:.3g} times the mean, in {len(scales)} steps"
        )
    if exchanged and (made["has_wrapper"] or made["has_hvd"]):
        return Finding(ONE_MEAN, "yes", "by DistributedDataParallel or hvd")
    return Finding(ONE_MEAN, "not seen", f"no own averaging of gradients{' of mean losses' * bool(exchanged)} was seen")


def _same_mode(records: Records) -> Finding:
    """Compare the modes of the models before the last backward pass of each step, if these are of one form."""
    rows = rows_of(events(records, "step").values())
    known = [row for row in rows if row[0]["modes"] and are_equal([len(each["modes"]) for each in row])]
    for row in known:
        if not are_equal([each["modes"] for each in row]):
            counts = [each["modes"].count("0") for each in row]
            rank = counts.index(max(counts))
            text = f"worker {rank} has {plural(counts[rank], 'module')} in evaluation mode, more than others"
            return Finding(SAME_MODE, "no", text, row[rank]["line"], "call model.train() on each worker")
    return Finding(SAME_MODE, "yes" if known else "not seen", plural(len(known), "step"))


def _same_averages(records: Records) -> Finding:
    """Compare running averages after the last step before they are saved, unless the program has changed them since."""
    compared = False
    for last, following in pairwise(rows_of(events(records, "step").values())):
        for own, step in zip(last, following, strict=True):
            where, saved = step["saved"]
            compared |= bool(where)
            if where and saved == own["averages"] and not are_equal([other["averages"] for other in last]):
                fix = "use SyncBatchNorm, or average the buffers of all workers before they are saved"
                return Finding(SAME_AVERAGES, "hint", "each worker averages over its own batches", where, fix)
    return Finding(SAME_AVERAGES, "yes" if compared else "not seen", "" if compared else "none were saved")


def _one_writer(records: Records) -> Finding:
    """Compare the files that the workers save by torch.save between the same two steps."""
    is_seen = False
    for row in (row for event in ("step", "end") for row in rows_of(events(records, event).values())):
        files = [dict(map(reversed, each.get("files", ()))) for each in row]  # the lines, by path
        for path in sorted(set().union(*files)):
            is_seen, writers = True, [rank for rank, own in enumerate(files) if path in own]
            if len(writers) > 1:
                text = f"{ranks(writers)} write {path.rpartition('/')[2]} at the same time"
                fix = "save it on one worker, or give each a name of its own; state_dict() of sharded models is for all"
                return Finding(ONE_WRITER, "no", text, files[writers[0]][path], fix)
    return Finding(ONE_WRITER, "yes" if is_seen else "not seen", "" if is_seen else "none was saved by torch.save")
