"""The report's files: RESULTS.md, index.html and the figures, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from lockstep.files.atomic import replacing
from lockstep.report.document import Document
from lockstep.report.draw import images, markdown, page

RESULTS, PAGE = "RESULTS.md", "index.html"


def write(document: Document, folder: Path) -> list[Path]:
    """Write the report into a folder, which is made if need be.

    Returns:
        The files, RESULTS.md and the page first.

    Raises:
        OSError: The folder or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = images.write(document, folder / markdown.FIGURES)
    # Last, so that they never speak of figures that are not there.
    for name, text in ((RESULTS, markdown.render(document)), (PAGE, page.render(document))):
        with replacing(folder / name, shared=True) as partial:
            partial.write_text(text, encoding="utf-8")
    return [folder / RESULTS, folder / PAGE, *figures]
