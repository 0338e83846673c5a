"""Write a report's files: RESULTS.md, index.html, figures and tables. Each file is replaced atomically.

`text` and `page` render the text and tables. `vega` describes charts for the page and for `images`.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.files.atomic import replacing
from lockstep.report.document import Document, Table
from lockstep.report.draw import images, page, text

RESULTS, PAGE, TABLES = "RESULTS.md", "index.html", "tables"


def write(document: Document, folder: Path) -> list[Path]:
    """Write the report to `folder`; the folder is created if missing.

    Returns:
        The paths written, RESULTS.md and the page first.

    Raises:
        OSError: The folder or a file cannot be written.
    """
    files: list[Path] = []
    for part in document.parts:
        if isinstance(part, Table):
            folder_name, contents = TABLES, {"csv": text.to_csv(part).encode(), "tex": text.to_latex(part).encode()}
        else:
            folder_name, contents = text.FIGURES, images.render(part)
        for suffix, content in contents.items():
            files.append(folder / folder_name / f"{part.key}.{suffix}")
            _replace(files[-1], content)
    # Written last, so that they never link to missing figures.
    for name, whole in ((RESULTS, text.to_markdown(document)), (PAGE, page.render(document))):
        _replace(folder / name, whole.encode())
    return [folder / RESULTS, folder / PAGE, *files]


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=True) as partial:
        partial.write_bytes(content)
