"""Build the whole report: every section that has records, in reading order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lockstep import __version__
from lockstep.report.document import Document, Section
from lockstep.report.read_steps import explain_all
from lockstep.report.run import Run, by_data_set
from lockstep.report.scaling_series import THRESHOLD, Series, series_of
from lockstep.report.sections import over_time, results, scaling, step_time, studies
from lockstep.report.sections.scaling import Costs
from lockstep.report.sources import Material


def build(
    material: Material,
    title: str = "",
    threshold: float = THRESHOLD,
    costs: Costs = Costs(),  # noqa: B008
) -> Document:
    """Return the report document for `material`.

    Args:
        title: "" for one that names the program or job, if the report is about its scaling only.
        threshold: Efficiency below which scaling is insufficient.
        costs: What the tables of costs are for.
    """
    series, scaling_warnings = series_of(material.studies)
    run_sections, run_warnings = _of_runs(material.runs, costs.carbon)
    sections: list[Section | None] = [
        *run_sections,
        _explanations(material),
        *scaling.build(series, threshold, costs),
        studies.build_batch(material),
        studies.build_loading(material),
        results.build_environments(material),
    ]
    return Document(
        title=title or _title(material, series),
        sections=[section for section in sections if section],
        warnings=[*material.warnings, *scaling_warnings, *run_warnings],
        made=f"generated on {time.strftime('%Y-%m-%d at %H:%M')} by lockstep {__version__} report",
    )


def _explanations(material: Material) -> Section | None:
    found = explain_all(material.runs, material.studies)
    lines = [line for name, verdict in found for line in (f"{name}: {verdict.lines[0]}", *verdict.lines[1:])]
    return Section("What bounds a step", "\n".join(lines)) if lines else None


def _title(material: Material, series: Sequence[Series]) -> str:
    """Return a title that names the only job of a report on scaling; otherwise a general one."""
    jobs = {item.job: item.program or item.label for item in series}
    is_scaling = not material.runs and len(jobs) == 1 and material.of_kind("scaling") == material.studies
    return f"Scaling of {next(iter(jobs.values()))}" if is_scaling else "Training results"


def _of_runs(all_runs: Sequence[Run], carbon: float | None) -> tuple[list[Section], list[str]]:
    """Return the sections about runs, data set by data set after all tables of results, and warnings."""
    data_sets = by_data_set(all_runs)
    firsts: list[Section] = []
    others: list[Section] = [*filter(None, [results.build_workers(data_sets)])]
    warnings: list[str] = []
    for number, (data, runs) in enumerate(data_sets.items(), start=1):
        io_section, io_warnings = over_time.build_storage(runs)
        warnings += io_warnings
        builders = (
            over_time.build_learning,
            over_time.build_throughput,
            step_time.build_worker_phases,
            over_time.build_loss_scale,
        )
        found = [results.build(runs, carbon), *filter(None, (*(build(runs) for build in builders), io_section))]
        first, *rest = [_named(section, data, number) for section in found] if len(data_sets) > 1 else found
        firsts.append(first)
        others += rest
    return [*firsts, *others], warnings


def _named(section: Section, data: str, number: int) -> Section:
    """Add the data set to a section's titles; from the second data set on, also add its number to the keys."""
    suffix = f"-{number}" if number > 1 else ""
    parts = [replace(part, title=f"{part.title}: {data}", key=part.key + suffix) for part in section.parts]
    return Section(f"{section.title}: {data}", section.text, parts)
