"""`lockstep train`: train a model on a data set or a folder of images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from lockstep.cli.json_output import with_job_end
from lockstep.cli.parse import TrainCommand, named_arch, parse_train
from lockstep.config.legacy_flags import translate
from lockstep.config.run_paths import how_to_resume, new_run_path, newest, runs_of, step_of
from lockstep.config.schema import TrainConfig, check_workers
from lockstep.data import catalog
from lockstep.errors import ConfigError, DataError, ReplicasDifferError
from lockstep.files.folder_lock import holder_here
from lockstep.imports import collector_paused
from lockstep.launch.command_workers import Elastic, WorkerCommand, run_workers
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

FATAL_SIGNAL = 128  # plus the signal's number: the exit code if a signal killed the job or a worker
RESUMABLE = (1, DataError.exit_code, ReplicasDifferError.exit_code)  # other errors name their own fix


def main(arguments: Sequence[str]) -> int:
    return with_job_end(partial(_main, arguments), "--json" in arguments)


def _main(arguments: Sequence[str], end: JobEnd) -> int:
    translation = translate(arguments, TrainCommand)
    arguments = translation.arguments
    command = parse_train(arguments)
    config = command.job
    if command.print_config:
        import yaml

        from lockstep.config.mapping import to_mapping

        print(yaml.safe_dump(to_mapping(config), sort_keys=False), end="")
        return 0
    _print_notes(translation.notes, command.where.is_manual)
    catalog.check(config.data)
    named = named_arch(command, arguments) if config.run.evaluate else None
    work = partial(_evaluate, config, named) if config.run.evaluate else partial(_train, config)
    check = partial(check_workers, config)
    earlier = runs_of(config)
    code = run_workers(
        WorkerCommand(
            ["train", *arguments],
            work,
            config.device,
            workers=command.workers,
            backend=config.parallel.dist_backend,
            where=command.where,
            check=check,
            elastic=_elastic(command, partial(describe_resume, config, earlier)),
            quiet=config.run.quiet,
            end=end if command.json else None,
        )
    )
    is_killed = code > FATAL_SIGNAL
    if (is_killed or code in RESUMABLE) and RankInfo.from_environment().launcher == "none" and not config.run.evaluate:
        nothing = "no checkpoint was written, so there is nothing to resume" if is_killed else ""
        if left := describe_resume(config, earlier) or nothing:
            print(f"lockstep: {left}", file=sys.stderr)
    return code


def describe_resume(config: TrainConfig, earlier: Sequence[Path]) -> str:
    """Return the newest checkpoint of a run that failed and how to resume from it; "" if there is none."""
    run = config.run.run_dir
    if run is None and config.run.resume is not None:
        from lockstep.run.records.run_folder import resumed_run_path

        run = resumed_run_path(config)
    runs = [run] if run else [path for path in runs_of(config) if path not in earlier and not holder_here(path)]
    left = [found for each in runs if (found := newest(each / "checkpoints"))]
    return "; or, if that run is another job's, ".join(
        f"the newest checkpoint is from step {step_of(path):,}, {path}; {how_to_resume(path.parent.parent, False)}"
        for path in sorted(left, key=lambda path: path.parents[1].name, reverse=True)  # not by modification time
    )


def _print_notes(notes: Sequence[str], manual: bool) -> None:
    """Print notes on older scripts' flags, once per job: only in the launcher, or on rank 0 with another launcher."""
    rank_info = RankInfo.from_environment()
    if rank_info.launcher == "none" or (rank_info.rank == 0 and not manual):
        for note in notes:
            print(f"lockstep train: note: {note}", file=sys.stderr)


def _elastic(command: TrainCommand, describe_resume: Callable[[], str]) -> Elastic | None:
    """Return how to restart the workers; None without restarts.

    Raises:
        ConfigError: The command only evaluates, so there is nothing to resume.
    """
    run = command.job.run
    if not command.restarts.is_elastic:
        return None
    if run.evaluate:
        raise ConfigError("--max-restarts and related flags cannot be combined with --evaluate; remove one of them")
    arguments = partial(_restart_arguments, command.job, is_dry=command.where.dry_run)
    return Elastic(command.restarts, arguments, describe_resume)


def _restart_arguments(config: TrainConfig, workers: int, is_dry: bool) -> list[str]:
    """Return the arguments that keep the run folder and the global batch the same in every restart."""
    arguments = [] if config.run.run_dir else ["--run-dir", str(_run_path(config, is_dry))]
    if config.global_batch_size is None and config.batch_workers is None:
        arguments += ["--batch-workers", str(workers)]
    return arguments


def _run_path(config: TrainConfig, is_dry: bool) -> Path:
    """Return the run folder that the first workers would choose; unless `is_dry`, create a new one."""
    found = None
    if config.run.resume is not None:
        from lockstep.run.records.run_folder import resumed_run_path

        found = resumed_run_path(config)
    if found is None:
        found = new_run_path(config)
        try:
            if not is_dry:
                found.mkdir(parents=True)  # reserves the name
        except OSError as error:
            raise ConfigError(
                f"run folder {found} cannot be written: {error.strerror}; choose another (--run-dir)"
            ) from None
    return found


def _train(config: TrainConfig, world: World) -> None:
    """Do the work of a worker, which begins again when it stays in a job that has lost another."""
    with collector_paused():
        import_module("torch._dynamo")  # imported by any optimizer; faster with the collector paused
        from lockstep.train.run import run

    run(config, world)


def _evaluate(config: TrainConfig, named: str | None, world: World) -> None:
    """Evaluate the weights of --resume or --pretrained; `named` is the model if the user named one, else None."""
    from lockstep.run.checkpoints.legacy_format import is_old
    from lockstep.train.inference import evaluate_checkpoint, evaluate_pretrained, summarize

    if config.run.resume is None:
        figures = evaluate_pretrained(config, world)
    else:
        path = _find_checkpoint(config, world)
        # An older script's file may not name its model; the recipe's is used then.
        figures = evaluate_checkpoint(config, world, path, config.model.arch if is_old(path) else named)
    if world.is_main:
        print(summarize(figures, world))


def _find_checkpoint(config: TrainConfig, world: World) -> Path:
    """Return the path that --resume refers to, the same on every worker."""
    from lockstep.run.records.run_folder import newest_run_path

    path: Path | str | None = config.run.resume
    if path == "auto":
        newest = config.run.run_dir or newest_run_path(config)
        path = world.from_main(str(newest) if newest else None)
        if path is None:
            raise ConfigError("--evaluate --resume auto: no run of this data set and model in runs/; specify one")
    return Path(str(path))
