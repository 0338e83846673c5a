"""`lockstep check`: whether the workers of a script train one model, on different data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from lockstep.cli.parse import parse
from lockstep.cli.run import split
from lockstep.config.flags import arg
from lockstep.config.values import check_global_batch
from lockstep.diagnosis import CHECK
from lockstep.errors import ConfigError, plural, printable, require
from lockstep.files.output import say
from lockstep.launch.controller.job_series import JobSeries, collect
from lockstep.launch.forking.python_command import PRELOAD
from lockstep.launch.node.hardware import count_gpus
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.script_check.answers import Finding
from lockstep.script_check.hooks import MARK
from lockstep.script_check.invariance import STEPS, judge_invariance
from lockstep.script_check.replicas import judge_replicas
from lockstep.script_check.samples import judge_samples
from lockstep.world.devices import usable_cores

FAULTY = 10  # the exit code if an answer is "no"
SIGNS = {"yes": ("✓", "green"), "no": ("✗", "bold red"), "hint": ("!", "yellow"), "not seen": ("·", "dim")}


@dataclass(frozen=True)
class CheckCommand:
    """Run a script for two epochs, or some steps, and answer whether its workers train one model on different data.

    The script runs unchanged, and ends with exit code 0 in the middle. Its output is shown only if it fails.

    Examples:
        lockstep check -- python train.py
        lockstep check -np 4 --steps 50 -- python train.py --lr 0.1
        lockstep check --invariance 64 -- python train.py --batch-size {batch}
    """

    workers: Annotated[int, arg(name="np", aliases=["-np"], metavar="N")] = 2
    """Number of workers, at least 2."""
    steps: int = 200
    """Steps after which the script is ended, if two epochs take longer."""
    minutes: float = 5.0
    """Minutes after which it is ended, at its next step or if it hangs."""
    invariance: Annotated[int | None, arg(metavar="N")] = None
    """Also compare the first losses with those of one worker, with N samples per step and {batch} per worker."""
    json: bool = False
    """Print the answers as JSON."""
    where: LaunchOptions = field(default_factory=LaunchOptions)

    def __post_init__(self) -> None:
        require(self.workers >= 2, "-np", self.workers, "at least 2: one worker has no others to agree with")
        require(self.steps >= 1, "--steps", self.steps, "at least 1")
        require(self.minutes > 0, "--minutes", self.minutes, "more than 0")


def main(arguments: Sequence[str]) -> int:
    flags, program = split(arguments)
    command = parse(CheckCommand, "check", flags)
    if not program:
        raise ConfigError("missing COMMAND; add it after the flags: lockstep check -- python train.py")
    check_global_batch(program, "--invariance", command.invariance, [command.workers])
    plan = _plan(command, program, command.workers, command.steps)
    if command.where.dry_run:
        print(f"{command.workers} workers: {' '.join(program)}")
        return 0
    code, records, rest = _run(plan)
    steps = {rank: sum(each["event"] == "step" for each in own) for rank, own in records.items()}
    for rank, own in sorted(records.items()):
        if error := next((each["error"] for each in own if each.get("error")), ""):
            say(f"lockstep check: worker {rank} is recorded up to step {steps[rank]} only: {printable(error)}")
    if not any(steps.values()):
        print(rest, end="", file=sys.stderr)
        text = "no step of an optimizer of torch was seen in the workers; a step is a call of the optimizer's step()"
        if not code:
            raise ConfigError(text)
        say(f"lockstep check: error: {text}")
        return code
    answers = [*judge_replicas(records), *judge_samples(records)]
    if command.invariance is not None and not code:
        _, alone, _ = _run(_plan(command, program, 1, min(command.steps, STEPS)))
        answers.append(judge_invariance(alone, records))
    is_faulty = any(answer.verdict == "no" for answer in answers)
    if code:
        print(rest, end="", file=sys.stderr)
    (_print_json if command.json else _print)(answers, steps, code)
    return FAULTY if is_faulty else code


def _plan(command: CheckCommand, program: Sequence[str], workers: int, steps: int) -> JobPlan:
    batch = str((command.invariance or 0) // workers)
    words = [word.replace("{batch}", batch) for word in program] if command.invariance else program
    here, cores = names_of_this_machine(), usable_cores()
    plan = plan_from(command.where, workers, words, os.environ, cores, count_gpus, here)
    if plan.manual:
        raise ConfigError("a check cannot be combined with --nodes or --dist-url; pass the hosts with -H")
    plan.check_program()
    seconds = 60 * command.minutes
    # Each worker has its own order of sets of strings, as on several hosts.
    environment = {**plan.environment, PRELOAD: "0", CHECK: f"{steps},{seconds}"}
    limit = min(plan.hang_timeout or seconds, seconds)  # workers that wait for each other cannot end themselves
    return replace(plan, environment=environment, hang_timeout=limit)


def _run(plan: JobPlan) -> tuple[int, dict[int, list[dict[str, Any]]], str]:
    """Run the job; return its exit code, the records of each worker, and its other output."""
    with JobSeries() as jobs:
        code, sent, rest = collect(jobs, plan, MARK)
    records: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(plan.workers)}
    for record in sent:
        records[record["rank"]].append(record)
    return code, records, rest


def _print(answers: Sequence[Finding], steps: dict[int, int], code: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"checked {plural(max(steps.values()), 'step')} of {plural(len(steps), 'worker')}")
    for answer in answers:
        sign, style = SIGNS[answer.verdict]
        line = Text.assemble((sign, style), f" {answer.question}", (f": {answer.verdict}", style))
        detail = printable(f"; {answer.detail}" if answer.detail else "")
        console.print(line.append(detail, "" if answer.fix else "dim"), soft_wrap=True)
        if answer.fix:
            where = f"{answer.where}: " if answer.where else ""
            console.print(Text(printable(f"    {where}{answer.fix}"), "bold"), soft_wrap=True)
    if code:
        console.print(f"the script ended early, with exit code {code}")


def _print_json(answers: Sequence[Finding], steps: dict[int, int], code: int) -> None:
    content = {"answers": [asdict(each) for each in answers], "steps": list(steps.values()), "exit_code": code}
    print(json.dumps(content, indent=1))
