"""What is reported of every observed program, on the scripts of `lockstep check`.

Each script is recorded for `lockstep check`, too: correct ones must give neither an alarm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import checked_programs
import pytest
from checked_programs import CORRECT, FAULTS
from worker_group import run_in_workers

from lockstep.diagnosis.board import Board
from lockstep.diagnosis.observed_steps import TrainedState
from lockstep.script_check.answers import Finding
from lockstep.script_check.hooks import record
from lockstep.script_check.recorder import Limits
from lockstep.script_check.replicas import judge_replicas
from lockstep.script_check.samples import judge_samples
from lockstep.script_check.state_comparison import StateComparison
from lockstep.script_check.state_recorder import Pace
from lockstep.world import observer
from lockstep.world.observer import Observer
from lockstep.world.world import World

EACH_THIRD_STEP = Pace(first=2, every=3, seconds=0.0, share=1e9)
OTHER_LAUNCHES = ("hvd", "accelerate", "lightning", "own_loop", "no_group")  # of scripts that connect by themselves
PROGRAMS = Path(checked_programs.__file__)
HANGS = "longer_on_rank_0"


NOTICED = {
    "inner_module": "the loss bypasses the wrapper",
    "no_wrapper": "they have exchanged nothing since the first step",
    "own_start": "they differed before the first step",
    "skips_on_high_loss": "a worker has skipped a step",
    "rate_by_rank": "the settings of their optimizers differ (learning rates 0.1, 0.2)",
    "never_synchronized": "they have exchanged nothing since the first step",
    "added_later": "the loss bypasses the wrapper",
    "same_seed": "all workers train on the same samples",
    "loads_on_rank_0": "changed weights or optimizer state alone",
}

NEED_A_CHECK = (
    "accumulates_wrongly",
    "adds_up_after_ddp",
    "all_save_one_file",
    "classes_in_own_order",
    "divided_twice",
    "evaluates_half",
    "evaluates_own_part",
    "files_in_another_order",
    "fsdp2_evaluates_own_part",
    "fsdp2_loads_a_part",
    "fsdp2_of_weights_on_rank_0",
    "fsdp2_rate_by_rank",
    "fsdp2_same_data",
    "fsdp2_skips_on_high_loss",
    "no_set_epoch",
    "no_set_epoch_in_a_loop_for_all",
    "optimizer_before_sharding",
    "other_epochs",
    "other_seeds_no_sampler",
    "own_seed_in_sampler",
    "penalty_on_rank_0",
    "repeats_in_processes",
    "same_noise",
    "same_noise_in_processes",
    "same_stream",
    "saves_own_averages",
    "seeds_each_epoch",
    "split_twice",
    "splits_by_own_seed",
    "stays_in_evaluation_mode",
    "sum_of_workers",
    "uneven_batches",
    "uneven_targets",
    "unread_half",
)


class EachStep(Observer):
    """Publishes after each step."""

    def step_is_counted(self) -> None:
        super().step_is_counted()
        self.publish()


def _findings(name: str) -> tuple[list[str], list[Finding]]:
    """Return what is found while a script trains in two workers, and the answers of a check."""

    def work(world: World) -> tuple[list[TrainedState], list[dict[str, Any]]]:
        states: list[TrainedState] = []
        sent: list[dict[str, Any]] = []

        class Kept:
            def publish_steps(self, steps: Any) -> None:
                states.append(steps.state)

        sys.modules.pop("mpi4py", None)  # another test's, by which a program may exchange gradients
        watching = record(world.rank, Limits(1000, 1000.0, epochs=1000), sent.append)
        observer.observe(EachStep(cast(Board, Kept()), EACH_THIRD_STEP))
        getattr(checked_programs, name)()
        watching.finish()
        return states, sent

    by_rank, sent = zip(*run_in_workers(2, work), strict=True)
    assert not [each for own in sent for each in own if each.get("error")]
    records = dict(enumerate(sent))
    answers = [*judge_replicas(records), *judge_samples(records)]
    comparison, longest = StateComparison(2), max(map(len, by_rank))
    rows = [[*own, *[own[-1] if own else TrainedState()] * (longest - len(own))] for own in by_rank]
    return [found for states in zip(*rows, strict=True) for found in comparison.compare(states)], answers


def _here(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(OTHER_LAUNCHES) and name != HANGS]


@pytest.mark.parametrize("name", _here(CORRECT))
def test_correct_scripts_raise_no_alarm(name: str) -> None:
    found, answers = _findings(name)
    assert not found
    assert not [answer for answer in answers if answer.verdict in ("no", "hint")]


@pytest.mark.parametrize(("name", "words"), NOTICED.items())
def test_what_is_certainly_wrong_is_said_once(name: str, words: str) -> None:
    ((found,), _) = _findings(name)
    assert words in found
    assert f"({PROGRAMS.name}:" in found.replace(f"{PROGRAMS.parent.relative_to(Path.cwd())}/", "")


@pytest.mark.long
@pytest.mark.parametrize("name", _here(sorted({*FAULTS} - {*NOTICED})))
def test_of_other_faults_only_these_need_a_check(name: str) -> None:
    assert len(_findings(name)[0]) == (name not in NEED_A_CHECK)
