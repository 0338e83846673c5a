"""Write a report's files: RESULTS.md, index.html, figures and tables. Each file is replaced atomically.

`markdown` and `page` render the text and tables. `vega` describes charts for the page and for `images`.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.files.atomic import replacing
from lockstep.report.document import Document
from lockstep.report.draw import images, markdown, page, tables

RESULTS, PAGE, TABLES = "RESULTS.md", "index.html", "tables"


def write(document: Document, folder: Path) -> list[Path]:
    """Write the report to `folder`; the folder is created if missing.

    Returns:
        The paths written, RESULTS.md and the page first.

    Raises:
        OSError: The folder or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [*images.write(document, folder / markdown.FIGURES), *tables.write(document, folder / TABLES)]
    # Written last, so that they never link to missing figures.
    for name, text in ((RESULTS, markdown.render(document)), (PAGE, page.render(document))):
        with replacing(folder / name, shared=True) as partial:
            partial.write_text(text, encoding="utf-8")
    return [folder / RESULTS, folder / PAGE, *files]
