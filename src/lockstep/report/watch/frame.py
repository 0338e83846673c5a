"""Draw one frame of the view, fitted to the lines and columns of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import median
from textwrap import wrap

from rich.text import Text

from lockstep.diagnosis.phases import NAMES
from lockstep.errors import plural
from lockstep.files.jsonl import count, one_line, text
from lockstep.report.watch.chart import ChartLine, draw_chart, sparkline
from lockstep.report.watch.run import Checkpoint, Condition, RunView, WatchedWorker, duration

TRAIN, VAL, QUIET = "cyan", "bright_magenta", "grey50"  # readable on dark and on light
SIDE_BY_SIDE = 76  # minimum number of columns for two charts side by side
MIN_CHART, MAX_CHART = 6, 28  # lines
FEW_WORKERS = 4  # lines
LABEL = 13  # columns
MAX_STRAGGLER_LINES = 3
LOW = 16  # lines; a lower terminal has room for only one line on a straggler
MIN_WRAP = 20  # columns
CONDITIONS: dict[Condition, tuple[str, str]] = {
    "reading": ("◌", QUIET),
    "waiting": ("◌", "yellow"),
    "running": ("●", "green"),
    "silent": ("▲", "bold red"),
    "stopped": ("■", "yellow"),
    "failed": ("✖", "bold red"),
    "finished": ("✔", "green"),
}


def draw_frame(snapshot: RunView, width: int, height: int) -> list[Text]:
    """Draw at most `height` lines of at most `width` columns.

    If there are too few lines, reduce the height of the charts, then omit the split of a step, then workers, then the
    charts.
    """
    head = [*_heading(snapshot, width), *_straggler(snapshot, width, height), *_progress(snapshot, width)]
    foot = [*_speed(snapshot, width), *_checkpoints(snapshot, width)]
    columns = 2 if width >= SIDE_BY_SIDE else 1
    rows_of_charts = 1 if columns == 2 or snapshot.metrics.lacks_classes else 2
    free = height - len(head) - len(foot) - 3  # blank lines between the blocks
    if snapshot.metrics.program:
        return _cut(_join([head, foot, _ranks(snapshot, free)]), width, height)
    wanted = 1 + len(snapshot.workers) if snapshot.workers else 0
    if free > rows_of_charts * MIN_CHART + min(wanted, FEW_WORKERS) and (split := _split(snapshot, width)):
        foot.insert(0, split)
        free -= 1
    for_workers = min(wanted, max(2, free - rows_of_charts * MIN_CHART), max(4, height // 3))
    has_points = any(snapshot.metrics.curve("loss", split) for split in ("train", "val"))
    most = MAX_CHART if has_points else MIN_CHART
    chart_height = min(most, (free - for_workers) // rows_of_charts)
    charts = _charts(snapshot, width, chart_height, columns) if chart_height >= 4 else []
    workers = _workers(snapshot, width, max(2, for_workers)) if free >= 2 else []
    return _cut(_join([head, charts, foot, workers]), width, height)


def _cut(lines: list[Text], width: int, height: int) -> list[Text]:
    for line in lines[:height]:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _join(blocks: Sequence[list[Text]]) -> list[Text]:
    lines: list[Text] = []
    for block in blocks:
        if block:
            lines += [Text(), *block] if lines else block
    return lines


def _heading(snapshot: RunView, width: int) -> list[Text]:
    job, own = snapshot.metrics.start, snapshot.metrics.program or snapshot.metrics.script
    arch = one_line(job.get("arch") or text(snapshot.config, "model", "arch"))
    data = one_line(job.get("data") or text(snapshot.config, "data", "dataset"))
    folder = one_line(snapshot.path.name)
    name = Text.assemble((f"{arch} on {data}" if arch and data else own or folder, "bold"))
    precision = one_line(text(snapshot.config, "numerics", "precision"))
    facts = [precision] if precision else []
    if (workers := count(job, "workers")) is not None:
        facts.insert(0, plural(workers, "worker"))
    if (batch := count(job, "global_batch")) is not None:
        facts.append(f"global batch {batch:,}")
    if (parameters := count(job, "parameters")) is not None:
        facts.append(f"{_short(parameters)} parameters")
    facts = [f" · {fact}" for fact in facts]
    while facts and name.cell_len + sum(map(len, facts)) > width:
        facts.pop()
    name.append("".join(facts))
    if name.cell_len + len(folder) + 2 <= width:
        name.append(" " * (width - name.cell_len - len(folder)) + folder, style=QUIET)
    sign, style = CONDITIONS[snapshot.state.condition]
    return [name, Text.assemble((f"{sign} {snapshot.state.text}", style))]


def _straggler(snapshot: RunView, width: int, height: int) -> list[Text]:
    """Return the newest report of ranks that slow the others down, wrapped."""
    found = snapshot.metrics.straggler
    if found is None:
        return []
    most = MAX_STRAGGLER_LINES if height >= LOW else 1
    text = f"▲ step {found.step:,}: {found.describe()}"
    lines = wrap(text, max(width, MIN_WRAP), subsequent_indent="  ", max_lines=most, placeholder="…")
    return [Text(line, style="yellow") for line in lines]


def _progress(snapshot: RunView, width: int) -> list[Text]:
    metrics = snapshot.metrics
    if not metrics.start:
        return []
    parts = [f"step {metrics.step:,}" + (f" of {metrics.last_step:,}" if metrics.last_step else "")]
    if metrics.steps_per_epoch:
        epoch = max(1, -(-metrics.step // metrics.steps_per_epoch))
        parts.insert(0, f"epoch {epoch:,}" + (f" of {metrics.planned_epochs:,}" if metrics.planned_epochs else ""))
    left = metrics.seconds_left(snapshot.now) if snapshot.state.condition == "running" else None
    if left is not None:
        parts.append(f"{duration(left)} left")
    parts.append(f"{duration(metrics.time_seconds)} of training")
    if len(" · ".join(parts)) > width:
        parts.pop()
    text = " · ".join(parts)
    if not metrics.last_step:
        return [Text(text)]
    share = min(1.0, metrics.step / metrics.last_step)
    room = width - len(text) - 8
    if room < 8:
        return [_bar(share, width - 6), Text(text)]
    return [_bar(share, min(room, 60)).append(f"  {text}")]


def _bar(share: float, width: int) -> Text:
    full = round(share * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), QUIET), f" {100 * share:3.0f} %")


def _charts(snapshot: RunView, width: int, height: int, columns: int) -> list[Text]:
    between = 3
    each = (width - between) // 2 if columns == 2 else width
    loss = draw_chart("loss", _curves(snapshot, "loss", lambda value: f"{value:#.3g}"), each, height)
    if snapshot.metrics.lacks_classes:
        return loss
    top1 = draw_chart(
        "top-1 %",
        _curves(snapshot, "top1", lambda value: f"{100 * value:.2f}"),
        each,
        height,
        show=lambda value: f"{100 * value:.3g}",
        may_be_log=False,
    )
    return _beside(loss, top1, each, between) if columns == 2 else [*loss, *top1]


def _curves(snapshot: RunView, name: str, show: Callable[[float], str]) -> list[ChartLine]:
    train, val = (snapshot.metrics.curve(name, split) for split in ("train", "val"))
    return [
        ChartLine("train", show(train[-1][1]) if train else "", train, TRAIN),
        ChartLine("val", show(val[-1][1]) if val else "", val, VAL),
    ]


def _beside(left: Sequence[Text], right: Sequence[Text], width: int, between: int) -> list[Text]:
    lines = []
    for one, other in zip_longest(left, right):
        line = one.copy() if one else Text()
        line.truncate(width, overflow="ellipsis")
        line.append(" " * (width - line.cell_len + between))
        lines.append(line.append_text(other or Text()))
    return lines


def _speed(snapshot: RunView, width: int) -> list[Text]:
    metrics = snapshot.metrics
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
    course = sparkline(rates, 8 if width < 72 else 12 if width < 100 else 40)
    parts[0] = f"{course}  {parts[0]}"
    lines = _labeled("speed", parts, width)
    lines[0].stylize(TRAIN, LABEL, LABEL + len(course))
    return lines


def _split(snapshot: RunView, width: int) -> Text | None:
    """Return the time per step of the median worker by phase; if there is no room for all, the longest phases."""
    seconds = {phase: value for phase, value in snapshot.metrics.phase_seconds.items() if value > 0}
    while seconds:
        parts = [f"{names.watch} {_milliseconds(seconds[phase])}" for phase, names in NAMES.items() if phase in seconds]
        line = f"{' · '.join(parts)} ms"
        if len(line) <= width - LABEL:
            return Text.assemble((f"{'step':{LABEL}}", "bold"), line)
        del seconds[min(seconds, key=seconds.__getitem__)]
    return None


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


def _checkpoints(snapshot: RunView, width: int) -> list[Text]:
    def describe(name: str, checkpoint: Checkpoint) -> str:
        top1 = f", top-1 {100 * checkpoint.top1:.2f} %" if checkpoint.top1 is not None else ""
        return f"{name} step {checkpoint.step:,}{top1}, {duration(snapshot.now - checkpoint.unix_time)} ago"

    if snapshot.last is None:
        is_training = snapshot.metrics.start and not snapshot.metrics.program
        return _labeled("checkpoints", ["none yet"], width) if is_training else []
    texts = [describe("last", snapshot.last)]
    if snapshot.best:
        same = snapshot.best.step == snapshot.last.step
        texts = [describe("last and best", snapshot.last)] if same else [*texts, describe("best", snapshot.best)]
    parts = [part for text in texts for part in ([text] if len(text) <= width - LABEL else text.rsplit(", ", 1))]
    return _labeled("checkpoints", parts, width)


def _workers(snapshot: RunView, width: int, height: int) -> list[Text]:
    """Return a heading and a line per worker; if there is no room for all, failed and silent ones have priority."""
    workers = snapshot.workers
    if not workers or snapshot.metrics.script:  # it has no log or I/O records of a worker
        return []
    course = max(0, min(24, width - 56))
    lines = [Text(f"{'worker':>6}  {'last activity':17}  {'reads':>10}  {'log':>8}", style="bold")]
    shown = workers
    if len(workers) > height - 1:
        shown = sorted(workers, key=lambda worker: _urgency(worker, snapshot))[: max(0, height - 2)]
        shown.sort(key=lambda worker: worker.rank)
    lines += [_worker(worker, snapshot, course) for worker in shown]
    rest = len(workers) - len(shown)
    if rest:
        troubled = sum(_urgency(worker, snapshot)[0] < 2 for worker in workers if worker not in shown)
        state = f"{troubled} of them failed or silent" if troubled else "none failed or silent"
        lines.append(Text(f"{'':6}  and {rest:,} more workers, {state}", style=QUIET))
    return lines


def _ranks(snapshot: RunView, height: int) -> list[Text]:
    """Return a heading and a line per rank of a program, with its milliseconds per step in each phase."""
    phases = {phase: seconds for phase in NAMES if (seconds := snapshot.metrics.by_rank.get(phase))}
    if not phases or height < 2:
        return []
    widths = {phase: max(len(NAMES[phase].watch), 6) for phase in phases}
    heading = "".join(f"  {NAMES[phase].watch:>{widths[phase]}}" for phase in phases)
    rows = [Text(f"{'rank':>6}{heading}  ms per step", style="bold")]
    ranks = range(len(next(iter(phases.values()))))
    for rank in ranks[: height - 1 if len(ranks) < height else height - 2]:
        cells = (f"  {_milliseconds(each[rank]):>{widths[phase]}}" for phase, each in phases.items())
        rows.append(Text(f"{rank:6}{''.join(cells)}"))
    if rest := len(ranks) + 1 - len(rows):
        rows.append(Text(f"{'':6}  and {rest:,} more ranks", style=QUIET))
    return rows


def _urgency(worker: WatchedWorker, snapshot: RunView) -> tuple[int, float, int]:
    """Return a sort key: failed workers first, then silent ones, then the others, longest without activity first."""
    silent = snapshot.now - worker.last_time if worker.last_time is not None else 0.0
    if worker.failure:
        return 0, 0.0, worker.rank
    return (1 if silent > snapshot.silent_seconds else 2), -silent, worker.rank


def _worker(worker: WatchedWorker, snapshot: RunView, course: int) -> Text:
    ago = f"{duration(snapshot.now - worker.last_time)} ago" if worker.last_time is not None else "no I/O records"
    rate = f"{_short(worker.read_rates[-1])}B/s" if worker.read_rates else ""
    log = f"{_short(worker.log_bytes)}B" if worker.log_bytes is not None else "none"
    is_silent = _urgency(worker, snapshot)[0] == 1 and snapshot.state.condition in ("running", "silent")
    line = Text(f"{worker.rank:6}  ")
    line.append(f"{ago:17}", style="red" if is_silent else "")
    line.append(f"  {rate:>10}  {log:>8}")
    if worker.failure:
        return line.append(f"  {worker.failure}", style="red")
    return line.append(f"  {sparkline(list(worker.read_rates), course)}", style=QUIET) if course >= 10 else line


def _short(number: float) -> str:
    """Format a number with three digits and a prefix, such as "11.2 M"."""
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit * 0.9995:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.3g} "
