"""Draw one frame of the view, fitted to the lines and columns of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from textwrap import wrap

from rich.text import Text

from lockstep.diagnosis.phases import NAMES
from lockstep.errors import plural
from lockstep.files.jsonl import count, one_line, text
from lockstep.files.metric_records import Split
from lockstep.report.watch.run import Condition, RunView, WatchedWorker, duration

TRAIN, VAL, QUIET = "cyan", "bright_magenta", "grey50"  # readable on dark and on light
BLOCKS = "▁▂▃▄▅▆▇█"
LABEL = 13  # columns
MAX_STRAGGLER_LINES = 3
LOW = 16  # lines; a lower terminal has room for only one line on a straggler
MIN_WRAP = 20  # columns
CONDITIONS: dict[Condition, tuple[str, str]] = {
    "waiting": ("◌", "yellow"),
    "running": ("●", "green"),
    "silent": ("▲", "bold red"),
    "stopped": ("■", "yellow"),
    "failed": ("✖", "bold red"),
    "finished": ("✔", "green"),
}
CURVES: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", lambda value: f"{value:#.3g}"),
    "top1": ("top-1 %", lambda value: f"{100 * value:.2f}"),
}
SPLITS: dict[Split, str] = {"train": TRAIN, "val": VAL}


def draw_frame(view: RunView, width: int, height: int) -> list[Text]:
    """Draw at most `height` lines of at most `width` columns; workers, then speed and curves are cut to fit."""
    figures = [*_speed(view, width), *_split(view, width), *_checkpoints(view, width)]
    blocks = [_heading(view), _straggler(view, width, height), _progress(view, width), _curves(view, width), figures]
    lines = [line for block in blocks if block for line in (*block, Text())]
    lines = [line for line in lines if line] if height < LOW else lines
    lines += _ranks(view, height - len(lines)) if view.metrics.program else _workers(view, height - len(lines))
    for line in lines[:height]:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, scaled from their minimum to their maximum, in at most `width` characters; the latest is last."""
    columns = max(1, min(width, len(values)))
    edges = [round(index * len(values) / columns) for index in range(columns + 1)]
    means = [sum(value / (end - start) for value in values[start:end]) for start, end in pairwise(edges)]
    low = min(means)
    span = (max(means) - low) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def _heading(view: RunView) -> list[Text]:
    job, own = view.metrics.start, view.metrics.program or view.metrics.script
    arch = one_line(job.get("arch") or text(view.config, "model", "arch"))
    data = one_line(job.get("data") or text(view.config, "data", "dataset"))
    folder = one_line(view.path.name)
    facts = []
    if (workers := count(job, "workers")) is not None:
        facts.append(plural(workers, "worker"))
    facts.append(one_line(text(view.config, "numerics", "precision")))
    if (batch := count(job, "global_batch")) is not None:
        facts.append(f"global batch {batch:,}")
    if (parameters := count(job, "parameters")) is not None:
        facts.append(f"{_short(parameters)} parameters")
    title = f"{arch} on {data}" if arch and data else own
    line = Text(title or folder, style="bold").append("".join(f" · {fact}" for fact in facts if fact), style="not bold")
    sign, style = CONDITIONS[view.state.condition]
    return [line.append(f"  {folder}" if title else "", style=QUIET), Text(f"{sign} {view.state.text}", style=style)]


def _straggler(view: RunView, width: int, height: int) -> list[Text]:
    """Return the newest report of ranks that slow the others down, and of a slow link, wrapped."""
    found, link = view.metrics.straggler, [*view.metrics.slow_links][-1:]
    texts = [f"▲ step {found.step:,}: {found.describe()}"] if found else []
    most = MAX_STRAGGLER_LINES if height >= LOW else 1
    lines = [
        line
        for each in (*texts, *(f"▲ {each.describe()}" for each in link))
        for line in wrap(each, max(width, MIN_WRAP), subsequent_indent="  ", max_lines=most, placeholder="…")
    ]
    return [Text(line, style="yellow") for line in lines]


def _progress(view: RunView, width: int) -> list[Text]:
    metrics = view.metrics
    if not metrics.start:
        return []
    parts = [f"step {metrics.step:,}" + (f" of {metrics.last_step:,}" if metrics.last_step else "")]
    if metrics.steps_per_epoch:
        epoch = max(1, -(-metrics.step // metrics.steps_per_epoch))
        parts.insert(0, f"epoch {epoch:,}" + (f" of {metrics.planned_epochs:,}" if metrics.planned_epochs else ""))
    left = metrics.seconds_left(view.now) if view.state.condition == "running" else None
    parts += [f"{duration(left)} left"] if left is not None else []
    parts.append(f"{duration(metrics.time_seconds)} of training")
    lines = _labeled("progress", parts, width)
    if metrics.last_step:
        share, room = min(1.0, metrics.step / metrics.last_step), max(0, min(60, width - LABEL - 6))
        full = round(share * room)
        bar = ("━" * full, "green"), ("─" * (room - full), QUIET), f" {100 * share:3.0f} %"
        lines.append(Text.assemble(" " * LABEL, *bar))
    return lines


def _curves(view: RunView, width: int) -> list[Text]:
    """Return a line per figure and split: the latest value, the curve, and the lowest and highest value."""
    lines: list[Text] = []
    for figure, (label, show) in CURVES.items():
        curves = {split: curve for split in SPLITS if (curve := view.metrics.curve(figure, split))}
        for number, (split, curve) in enumerate(curves.items()):
            value = "NaN" if view.metrics.is_nan(figure, split) else show(curve[-1])
            latest, extent = f"{split:5} {value:>8}  ", f"  {show(min(curve))} to {show(max(curve))}"
            drawn = sparkline(curve, max(8, min(60, width - LABEL - len(latest) - len(extent))))
            heading = (f"{'' if number else label:{LABEL}}", "bold")
            lines.append(Text.assemble(heading, latest, (drawn, SPLITS[split]), (extent, QUIET)))
    return lines


def _speed(view: RunView, width: int) -> list[Text]:
    metrics = view.metrics
    recent, rates, figures = metrics.recent_rates, metrics.rates, metrics.latest
    if not recent or not rates:
        return []
    show = ",.0f" if median(rates) >= 100 else ".3g"
    parts = [f"now {median(recent):{show}} {metrics.rate_field[1]}, median {median(rates):{show}}"]
    if "data_wait" in figures:
        parts.append(f"data wait {100 * figures['data_wait']:.0f} %")
    if "lr" in figures:
        parts.append(f"lr {figures['lr']:.3g}")
    if "loss_scale" in figures:
        parts.append(f"loss scale {figures['loss_scale']:,g}, {figures.get('skipped_steps', 0):,.0f} steps skipped")
    return _labeled("speed", parts, width)


def _split(view: RunView, width: int) -> list[Text]:
    """Return the time per step of the median worker by phase."""
    seconds = {phase: value for phase, value in view.metrics.phase_seconds.items() if value > 0}
    parts = [f"{names.watch} {_milliseconds(seconds[phase])}" for phase, names in NAMES.items() if phase in seconds]
    return _labeled("step", [*parts[:-1], f"{parts[-1]} ms"], width) if parts else []


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.2g}" if value < 10 else f"{value:.3g}"


def _labeled(label: str, parts: Sequence[str], width: int) -> list[Text]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= width - LABEL:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return [Text.assemble((f"{'' if number else label:{LABEL}}", "bold"), line) for number, line in enumerate(lines)]


def _checkpoints(view: RunView, width: int) -> list[Text]:
    found = view.checkpoints.items()
    parts = [f"{name} step {step:,}, {duration(view.now - unix_time)} ago" for name, (step, unix_time) in found]
    is_training = view.metrics.start and not view.metrics.program
    return _labeled("checkpoints", parts or ["none yet"], width) if parts or is_training else []


def _workers(view: RunView, height: int) -> list[Text]:
    """Return a heading and a line per worker; if there is no room for all, failed, then silent ones come first."""
    workers = view.workers
    if not workers or height < 2 or view.metrics.script:  # it has no log or I/O records of a worker
        return []
    shown = sorted(workers, key=lambda worker: (not worker.failure, worker.last_time or view.now, worker.rank))
    shown = shown[: height - 1 if len(workers) < height else height - 2]
    lines = [Text(f"{'worker':>6}  {'last activity':17}  {'reads':>10}", style="bold")]
    lines += [_worker(worker, view) for worker in sorted(shown, key=lambda worker: worker.rank)]
    return [*lines, *_rest(len(workers) - len(shown), "workers")]


def _rest(count: int, noun: str) -> list[Text]:
    return [Text(f"{'':6}  and {count:,} more {noun}", style=QUIET)] if count else []


def _ranks(view: RunView, height: int) -> list[Text]:
    """Return a heading and a line per rank of a program, with its milliseconds per step in each phase."""
    phases = {phase: seconds for phase in NAMES if (seconds := view.metrics.by_rank.get(phase))}
    if not phases or height < 2:
        return []
    widths = {phase: max(len(NAMES[phase].watch), 6) for phase in phases}
    heading = "".join(f"  {NAMES[phase].watch:>{widths[phase]}}" for phase in phases)
    rows = [Text(f"{'rank':>6}{heading}  ms per step", style="bold")]
    ranks = range(len(next(iter(phases.values()))))
    for rank in ranks[: height - 1 if len(ranks) < height else height - 2]:
        cells = (f"  {_milliseconds(each[rank]):>{widths[phase]}}" for phase, each in phases.items())
        rows.append(Text(f"{rank:6}{''.join(cells)}"))
    return [*rows, *_rest(len(ranks) + 1 - len(rows), "ranks")]


def _worker(worker: WatchedWorker, view: RunView) -> Text:
    silent = view.now - worker.last_time if worker.last_time is not None else None
    ago = f"{duration(silent)} ago" if silent is not None else "no I/O records"
    rate = f"{_short(worker.read_rate)}B/s" if worker.read_rate is not None else ""
    is_alarming = (silent or 0.0) > view.silent_seconds and view.state.condition in ("running", "silent")
    activity = (f"{ago:17}", "red" if is_alarming else "")
    return Text.assemble(f"{worker.rank:6}  ", activity, f"  {rate:>10}", (f"  {worker.failure}", "red"))


def _short(number: float) -> str:
    """Format a number with three digits and a prefix, such as "11.2 M"."""
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit * 0.9995:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.3g} "
