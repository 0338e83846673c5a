"""The whole report: all sections for which there are records, in the order in which people read them."""

from __future__ import annotations

import time

from lockstep import __version__
from lockstep.report.document import Document, Section
from lockstep.report.read.sources import Material
from lockstep.report.sections import (
    batch,
    collectives,
    comparisons,
    large_batch,
    learning,
    loading,
    loss_scale,
    results,
    run_environments,
    scaling,
    storage,
    throughput,
    time_split,
    workers,
)


def build(material: Material, title: str) -> Document:
    """Make the document of what was read."""
    scaling_sections, scaling_warnings = scaling.build(material)
    io_section, io_warnings = storage.build(material)
    sections: list[Section | None] = [
        results.build(material),
        learning.build(material),
        throughput.build(material),
        workers.build(material),
        *scaling_sections,
        time_split.build(material),
        time_split.build_memory(material),
        collectives.build(material),
        batch.build(material),
        loading.build(material),
        io_section,
        large_batch.build(material),
        comparisons.build(material),
        loss_scale.build(material),
        run_environments.build(material),
    ]
    return Document(
        title=title,
        sections=[section for section in sections if section],
        warnings=[*material.warnings, *scaling_warnings, *io_warnings],
        made=f"made on {time.strftime('%Y-%m-%d at %H:%M')} by lockstep {__version__} report",
    )
