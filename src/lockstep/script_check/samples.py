"""Whether the workers train and evaluate on all data, each on its own part.

Samples are compared by their content, as the model received it, and by their indices where the data sets of all workers
are known to be the same. Passes of a loader that the program left early say nothing about what was left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations
from statistics import fmean
from typing import Any

from lockstep.errors import plural
from lockstep.script_check.answers import Finding, Record, Records, are_equal, events, ranks, rows_of
from lockstep.script_check.fingerprints import UNKNOWN
from lockstep.script_check.replicas import are_replicas

OTHERS = "the workers train on different samples"
NEW_ORDER = "the order of the samples changes with each epoch"
ALL_SAMPLES = "an epoch has every sample once"
SAME_LENGTH = "an epoch has equally many batches on each worker"
SAME_SHARE = "all samples weigh the same in the loss"
EVALUATED = "evaluations are of all data"
AUGMENTED = "random augmentation differs between the workers"
SAME_CLASSES = "each class has the same number on all workers"
QUESTIONS = (OTHERS, NEW_ORDER, ALL_SAMPLES, SAME_CLASSES, SAME_LENGTH, SAME_SHARE, AUGMENTED, EVALUATED)
SAMPLER = "pass sampler=DistributedSampler(dataset) to the DataLoader"
SHARE_OUT = "let each process read its own part in the data set's __iter__: torch.utils.data.get_worker_info()"
SAME_ORDER = "make them alike on all workers: sort files and sets, and seed what shuffles or splits them"
SAME_EPOCH = "call sampler.set_epoch(epoch) with the same number on all workers"
SPLIT_ONCE = "Accelerate, for example, splits the data itself: leave out the DistributedSampler"
REDUCE = "add up the counts of all workers with all_reduce, and divide then"
UNEVEN = 0.05  # a mean difference between the workers' shares that is worth a word
MIN_STEPS = 2
MIN_LOSSES = 8  # that a term for some data alone is in every loss of one worker, in none of another: 2 ** -16 at most


def judge_samples(records: Records) -> list[Finding]:
    """Answer `QUESTIONS`."""
    if not are_replicas(records):
        text = "the workers do not train replicas of one model"
        return [Finding(question, "not seen", text) for question in QUESTIONS]
    passes = list(_passes(records))
    trained = [each for each in passes if not each[0]["is_evaluation"]]
    seen = {one["data"] for each in trained for one in each}  # passes without training adjust batch norm, for example
    evaluated = [each for each in passes if all(one["is_evaluation"] and one["data"] not in seen for one in each)]
    steps, joins = rows_of(events(records, "step").values()), _joins(records)
    return [
        _others(steps, trained),
        _new_order(records),
        _of_other_epochs(records) or _all_samples(trained),
        _same_classes(passes),
        _same_length(trained, "or join()" if joins else "or a loader starts again" if _cycles(records) else ""),
        _of_other_terms(records) or _same_share(steps, trained, joins),
        _augmented(trained),
        _evaluated(evaluated, records),
    ]


def _passes(records: Records) -> Iterator[list[Record]]:
    """Yield the passes that all workers made at the same place of the program."""
    found = [_by_place(own) for own in events(records, "epoch").values()]
    for place in found[0]:
        if all(place in own for own in found):
            yield [own[place] for own in found]


def _by_place(epochs: Sequence[Record]) -> dict[tuple[str, int], Record]:
    """Number the passes that begin in the same line."""
    count: Counter[str] = Counter()
    places = {}
    for epoch in epochs:
        places[epoch["line"], count[epoch["line"]]] = epoch
        count[epoch["line"]] += 1
    return places


def _is_same_data(each: Sequence[Record]) -> bool:
    return bool(each[0]["data"]) and are_equal([(one["data"], one["length"]) for one in each])


def _is_mixed(each: Sequence[Record]) -> bool:
    """Whether samplers split data for all workers, but have it in another order, or another part, on each worker."""
    is_split = all(one["parts"] == len(each) and one["items"] and one["data"] for one in each)
    is_alike = _is_same_data(each) and are_equal([one["order"] for one in each])
    return is_split and are_equal([(one["items"], one["length"]) for one in each]) and not is_alike


def _of_other_epochs(records: Records) -> Finding | None:
    """Return the finding if the samplers of a line draw the order of another epoch on some worker.

    Passes that one worker alone makes in the same line shift the others, so there the epochs are not compared.
    """
    drawn = [defaultdict[tuple[str, str], list[int]](list) for _ in records]
    for own, passes in zip(drawn, events(records, "epoch").values(), strict=True):
        for one in passes:
            if one["order"] and one["parts"] == len(drawn) and one["data"]:
                own[one["line"], one["data"]].append(one["drawn_for"])
    for place, epochs in drawn[0].items():
        others = [own[place] for own in drawn]
        if are_equal([*map(len, others)]) and any(each != epochs for each in others):
            detail = "the samplers draw the order of another epoch on each worker, so parts overlap"
            return Finding(ALL_SAMPLES, "no", detail, place[0], SAME_EPOCH)
    return None


def _share(each: Sequence[Record]) -> int:
    """How many samples may be left out or repeated, to fill or drop a global batch."""
    return len(each) * int(max(size for one in each for size in one["sizes"]))


def _is_complete(each: Sequence[Record]) -> bool:
    return all(one["is_complete"] for one in each)


def _unread(each: Sequence[Record]) -> int:
    """Return the number of samples that no worker read, because samplers split the data by another number; else 0."""
    unread = (each[0]["length"] or 0) - len({index for one in each for index in one["indices"]})
    return unread if unread > _share(each) and any(one["parts"] not in (None, len(each)) for one in each) else 0


def _is_split_twice(each: Sequence[Record]) -> bool:
    """Whether what reads a sampler delivers only a part of its samples on each worker, as if others had the rest."""
    return all(one["part"] and one["part"] - len(one["indices"]) >= _share(each) for one in each)


def _others(steps: Sequence[Sequence[Record]], passes: Sequence[Sequence[Record]]) -> Finding:
    for each in (one for one in passes if not _are_shared(steps, one)):
        rows = [one["indices"] for one in each]
        if _is_same_data(each) and len(rows[0]) >= MIN_STEPS and are_equal(rows):
            detail = f"all {len(rows)} workers read the same {len(rows[0]):,} samples in the same order"
            return Finding(OTHERS, "no", detail, each[0]["line"], SAMPLER)
        repeated = _read_twice(each)
        if repeated > _share(each):
            text = f"{repeated:,} samples are read by several workers in one epoch"
            return Finding(OTHERS, "no", text, each[0]["line"], SAMPLER)
    known = [row for row in steps if all(step["inputs"] for step in row)]
    if len({sample for row in known for step in row for sample in step["inputs"]}) < MIN_STEPS:  # one constant
        return Finding(
            OTHERS, "yes" if passes else "not seen", "by their indices" if passes else "no samples were seen"
        )
    equal = [row for row in known if are_equal([sorted(step["inputs"]) for step in row])]
    if len(equal) == len(known) >= MIN_STEPS:
        detail = f"all workers train on the same samples, in each of {len(known)} steps"
        fix = f"let each worker read its own part, by its rank; with a DataLoader, {SAMPLER}"
        return Finding(OTHERS, "no", detail, passes[0][0]["line"] if passes else known[0][0]["line"], fix)
    return Finding(OTHERS, "yes", plural(len(known), "step"))


def _are_shared(steps: Sequence[Sequence[Record]], each: Sequence[Record]) -> bool:
    """Whether each worker trains on its own part of every batch that it reads."""
    parts = [[step["inputs"] for step in row] for row in steps if all(step["inputs"] for step in row)]
    most = max((len(part) for row in parts for part in row), default=math.inf)
    return len(each) * most <= max(each[0]["sizes"]) and not any(map(are_equal, parts))


def _read_twice(each: Sequence[Record]) -> int:
    """Return the number of samples of a complete epoch if all workers read the same ones, without replacement; else 0.

    Other repeated samples are draws of each worker's own, or fill a batch.
    """
    first, *others = (sorted(one["indices"]) for one in each)
    is_comparable = _is_same_data(each) and _is_complete(each) and len(set(first)) == len(first)
    return len(first) if is_comparable and all(row == first for row in others) else 0


def _new_order(records: Records) -> Finding:
    compared = 0
    for own in events(records, "epoch").values():
        before: dict[tuple[Any, ...], Record] = {}
        for epoch in own:
            if epoch["is_evaluation"] or not epoch["shuffles"] or len(epoch["indices"]) < MIN_STEPS:
                continue
            loader = epoch["line"], epoch["data"], epoch["length"]  # several may be read in one line
            last, before[loader] = before.get(loader), epoch
            if last is None or epoch["optimizer"] != last["optimizer"]:  # of another training in the same program
                continue
            compared += 1
            length = min(len(epoch["indices"]), len(last["indices"]))
            if epoch["indices"][:length] == last["indices"][:length] and length >= MIN_STEPS:
                fix = "call sampler.set_epoch(epoch) at the start of each epoch"
                if not epoch["has_set_epoch"]:
                    fix = "do not seed the loader's generator again in each epoch"
                detail = f"two epochs of {ranks([epoch['rank']])} have the same order, though the sampler shuffles"
                return Finding(NEW_ORDER, "no", detail, epoch["line"], fix)
    if not compared:
        return Finding(NEW_ORDER, "not seen", "no loader that shuffles began a second epoch")
    return Finding(NEW_ORDER, "yes", "")


def _all_samples(passes: Sequence[Sequence[Record]]) -> Finding:
    """Compare complete epochs; samplers that draw, repeat or leave out samples by design answer nothing."""
    whole = ""
    for each in passes:
        if each[0]["repeats"]:
            return Finding(
                ALL_SAMPLES, "no", "each process of the loader reads all of them", each[0]["line"], SHARE_OUT
            )
        if _is_mixed(each):
            detail = "the workers' data sets or samplers have other orders or splits of the data, so parts overlap"
            return Finding(ALL_SAMPLES, "no", detail, each[0]["line"], SAME_ORDER)
        rows = [one["indices"] for one in each]
        if _is_complete(each) and all(rows) and _is_split_twice(each):
            detail = f"each worker reads {len(rows[0]):,} of the {each[0]['part']:,} samples of its sampler"
            return Finding(ALL_SAMPLES, "no", detail, each[0]["line"], SPLIT_ONCE)
        if (
            not _is_same_data(each)
            or not _is_complete(each)
            or not all(one["parts"] and one["indices"] for one in each)
        ):
            continue
        length = each[0]["length"] or 0
        if (unread := _unread(each)) and all(len(set(row)) == len(row) for row in rows):
            detail = f"{unread:,} of {length:,} samples are read by no worker"
            return Finding(ALL_SAMPLES, "no", detail, each[0]["line"], "split the data by the number of workers")
        whole = whole or (f"{length:,} samples" if length - len(set().union(*rows)) <= _share(each) else "")
    unseen = "no epoch of a DistributedSampler was complete"
    return Finding(ALL_SAMPLES, "yes" if whole else "not seen", whole or unseen)


def _same_classes(passes: Sequence[Sequence[Record]]) -> Finding:
    """Compare the numbers of data sets with the same classes."""
    is_seen = False
    for each in passes:
        for name in each[0]["classes"]:
            known = [one["classes"].get(name, ("", rank)) for rank, one in enumerate(each)]
            if are_equal([classes for classes, _ in known]):
                is_seen = True
                if not are_equal(known):
                    fix = "sort the names: sorted(os.listdir(folder)), sorted(set(names))"
                    return Finding(SAME_CLASSES, "no", f"{name} has another order on a worker", each[0]["line"], fix)
    return Finding(
        SAME_CLASSES, "yes" if is_seen else "not seen", "" if is_seen else "no data set has names of classes"
    )


def _joins(records: Records) -> bool:
    """Whether workers with fewer batches may take part in the steps of the others: by `Join`, or with hvd."""
    joined = any(step["joins"] for own in events(records, "step").values() for step in own)
    return joined or any(made["has_hvd"] for own in events(records, "optimizer").values() for made in own)


def _cycles(records: Records) -> bool:
    """Whether a worker with fewer batches starts its loader again, to make as many steps as the others."""
    return any(epoch["cycles"] for own in events(records, "epoch").values() for epoch in own)


def _same_length(passes: Sequence[Sequence[Record]], is_free: str) -> Finding:
    """Compare complete epochs; `is_free` says why they may differ."""
    complete = list(filter(_is_complete, passes))
    for each in complete:
        counts = [len(one["sizes"]) for one in each]
        if not are_equal(counts) and not is_free:
            detail = f"{', '.join(map(str, counts))} batches on {ranks(range(len(counts)))}"
            fix = "drop or fill the last batches (DistributedSampler does), or train within model.join()"
            return Finding(SAME_LENGTH, "no", detail, each[0]["line"], fix)
    if not complete:
        return Finding(SAME_LENGTH, "not seen", "no loader delivered all its batches")
    return Finding(SAME_LENGTH, "yes", is_free or f"{len(complete[0][0]['sizes'])} batches")


def _of_other_terms(records: Records) -> Finding | None:
    """Return the finding if each loss of a worker has operations that no loss of another one has."""
    steps = [Counter(step["optimizer"] for step in own) for own in events(records, "step").values()]
    for row in rows_of(events(records, "losses").values()):
        if any(own[loss["optimizer"]] < MIN_LOSSES for own, loss in zip(steps, row, strict=True)):
            continue
        for one, other in permutations(row, 2):
            more = sorted({*one["always"]} - {*other["ever"]})
            if more and UNKNOWN not in other["ever"] and other["ever"] and one["optimizer"] == other["optimizer"]:
                text = f"worker {one['rank']}'s loss has terms that worker {other['rank']}'s has not: {more[0]}"
                fix = "compute the loss alike on each worker: in the mean of the gradients, a term of one is divided"
                return Finding(SAME_SHARE, "no", text, one["line"], fix)
    return None


def _same_share(steps: Sequence[Sequence[Record]], passes: Sequence[Sequence[Record]], joins: bool) -> Finding:
    known = [row for row in steps if all(step["is_mean"] and step["losses"] == 1 for step in row)]
    if not known or joins:
        return Finding(SAME_SHARE, "not seen", "no step whose loss is a mean over a batch")
    targets = [[step["targets"] for step in row] for row in known]
    counted = [each for each in passes if all(one["indices"] for one in each)]
    samples = [list(row) for each in counted for row in zip(*(one["sizes"] for one in each), strict=False)]
    for what, counts in (("targets", targets), ("samples", samples)):
        positive = [row for row in counts if all(row)]
        uneven = fmean(max(row) / min(row) - 1 for row in positive) if positive else 0.0
        if len(positive) >= MIN_STEPS and uneven > UNEVEN:
            worst = max(positive, key=lambda row: max(row) / min(row))
            detail = (
                f"the loss is each worker's mean, of different numbers of {what}: {uneven:.0%} apart on average, "
                f"at most {max(worst):,} and {min(worst):,}"
            )
            fix = f"divide the sum of the losses by the {what} of all workers: an all_reduce of the count"
            return Finding(SAME_SHARE, "no", detail, known[0][0]["line"], fix)
    return Finding(SAME_SHARE, "yes", plural(len(known), "step"))


def _augmented(passes: Sequence[Sequence[Record]]) -> Finding:
    drawn = [each for each in passes if all(one["draws"] for one in each)]
    for each in drawn:
        if any(are_equal([one["draws"].get(name, rank) for rank, one in enumerate(each)]) for name in each[0]["draws"]):
            detail = "the data sets of all workers draw the same random numbers"
            fix = "seed them with the rank, such as torch.manual_seed(seed + rank) after the model is made"
            return Finding(AUGMENTED, "hint", detail, each[0]["line"], fix)
    return Finding(AUGMENTED, "yes" if drawn else "not seen", "" if drawn else "no random samples were seen")


def _evaluated(passes: Sequence[Sequence[Record]], records: Records) -> Finding:
    alone = _evaluated_by_one(records)
    for each in passes:
        rows = [one["indices"] for one in each]
        if not _is_same_data(each) or not all(rows) or not _is_complete(each):
            continue
        length, union = each[0]["length"], len(set().union(*rows))
        if all(len(set(row)) == length for row in rows):
            alone = f"{length:,} samples, by each worker"
            continue
        if unread := _unread(each):
            detail = f"{unread:,} of {length:,} samples are left out"
            return Finding(EVALUATED, "no", detail, each[0]["line"], SAMPLER)
        if any(one["exchanges"] == 0 for one in each):
            part = f"each worker evaluates a part ({len(rows[0]):,} of {length:,} samples)"
            if all(one["files"] for one in each):
                return Finding(EVALUATED, "not seen", f"{part}, and writes files, perhaps with its results")
            return Finding(EVALUATED, "no", f"{part}, and no results are added up", each[0]["line"], REDUCE)
        twice = sum(map(len, rows)) - union
        filled = f"; {twice:,} are read twice to fill batches: do not count them" if twice else ""
        return Finding(EVALUATED, "yes", f"{union:,} samples, in parts{filled}")
    unseen = "no complete evaluation of data that all workers share"
    return Finding(EVALUATED, "yes" if alone else "not seen", alone or unseen)


def _evaluated_by_one(records: Records) -> str:
    """Return which worker alone evaluates all data, as a sentence; "" if none does."""
    places = {rank: _by_place(own) for rank, own in events(records, "epoch").items()}
    for rank, own in places.items():
        for place, epoch in own.items():
            is_whole = epoch["is_complete"] and len(set(epoch["indices"])) == epoch["length"]
            if epoch["is_evaluation"] and is_whole and sum(place in each for each in places.values()) == 1:
                return f"{epoch['length']:,} samples, by {ranks([rank])}"
    return ""
