"""Steps as they are read from the records of runs and studies, for an explanation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.report.read_steps import explain_studies, facts_of, measured_in
from lockstep.report.step_verdict import explain
from lockstep.report.worker_records import RunRecords

FACTS = ProgramFacts(4_000_000, 4, 20, "ddp", 1, 2, 2, 0, 0.5, "cpu")


def _records(*seconds: float) -> RunRecords:
    """Return the records of two workers whose backward pass took so long in each interval."""
    records = RunRecords()
    records.take({"kind": "run", "step": 0, "time_seconds": 0, "workers": 2, "hosts": 2, "program": "train.py"})
    for number, each in enumerate(seconds, start=1):
        phases = {"forward": [0.1, 0.1], "backward": [each, each], "reduction": [0.3, 0.2]}
        records.take({"kind": "step", "step": 10 * number, "time_seconds": number, "phase_seconds": phases})
    records.take({"kind": "program", "step": 100, "time_seconds": 10, **asdict(FACTS), "transfer_seconds": 0.15})
    return records


def test_a_programs_usual_step_is_the_median_of_its_records() -> None:
    """An evaluation, in the third record, changes nothing."""
    measured = measured_in(_records(0.4, 0.4, 9.0, 0.4, 0.4, 0.4))
    assert measured.phases == {"forward": [0.1, 0.1], "backward": [0.4, 0.4], "reduction": [0.3, 0.2]}
    assert (measured.transfer, measured.difference, measured.hosts, measured.facts) == (0.15, 0.0, 2, FACTS)


def test_the_use_of_gpus_and_slow_links_are_read() -> None:
    records = _records(*[0.4] * 4)
    for number, use in enumerate((0.2, 0.3, 0.9, math.nan), start=5):
        records.take({"kind": "step", "step": 10 * number, "time_seconds": number, "gpu_use": use})
    records.take({"kind": "slow_link", "ends": ["a", "b"], "evidence": "slow", "rate": 0.1})
    measured = measured_in(records)
    assert (measured.gpu_use, [link.ends for link in measured.slow_links]) == (0.3, [("a", "b")])


def test_halves_of_a_run_are_compared() -> None:
    measured = measured_in(_records(0.4, 0.4, 0.4, 0.8, 0.8, 0.8))
    assert measured.difference == pytest.approx(2.55 / 1.75 - 1, abs=0.2)
    short = measured_in(_records(0.4, 0.4, 0.4))
    assert explain(short).bound == ""
    assert measured_in(_records()) is None


def test_damaged_facts_are_unknown() -> None:
    assert facts_of({"threads": "4", "cores": True, "device": 3, "gradient_bytes": 1e99}) == ProgramFacts()
    assert facts_of(asdict(FACTS)) == FACTS


def _study(rate: float, workers: int = 2, **more: Any) -> dict[str, Any]:
    phases = {
        phase: [seconds] * workers for phase, seconds in (("forward", 0.1), ("backward", 0.2), ("reduction", 0.5))
    }
    about = {"kind": "scaling", "modes": ["weak"], "label": "train.py", "workers": workers, "nodes": 2}
    return {**about, "samples_per_second": rate, "phase_seconds": phases, "measured_steps": 30, **more}


def test_a_study_is_explained_by_its_most_workers() -> None:
    facts = {"program": asdict(FACTS), "transfer_seconds": 0.4}
    found = explain_studies([_study(90, 1), _study(100, **facts), _study(104, **facts)])
    ((name, verdict),) = found.items()
    assert (name, verdict.bound) == ("train.py, weak scaling, 2 workers", "slow link")
    ((_, noisy),) = explain_studies([_study(100), _study(130)]).items()
    assert noisy.text == "too noisy to say what bounds the step: its times differ by 30 %"
    assert explain_studies([json.loads('{"kind": "scaling", "modes": ["weak"], "workers": 2}')]) == {}
