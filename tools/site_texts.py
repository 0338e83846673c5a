"""Add the texts that language models read to a built site: each page as Markdown, and llms.txt, which lists them.

    uv run --group dev zensical build --strict && python tools/site_texts.py site

https://llmstxt.org describes llms.txt. Pages that mkdocstrings writes from docstrings keep its directives as Markdown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^ *<!--.*?-->\n", re.MULTILINE)  # those of the tests and generators


def main(site: Path, root: Path = ROOT) -> None:
    docs = root / "docs"
    for page in docs.rglob("*.md"):
        text = MARK.sub("", page.read_text(encoding="utf-8"))
        (site / page.relative_to(docs)).write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms_txt(docs, root / "mkdocs.yml"), encoding="utf-8")


def llms_txt(docs: Path, configuration: Path) -> str:
    """Return the list of the pages in the order of the navigation, by its sections."""
    settings = yaml.safe_load(configuration.read_text(encoding="utf-8"))
    parts = [f"# {settings['site_name']}\n\n> {settings['site_description']}\n"]
    for section in settings["nav"]:
        ((title, entry),) = section.items()
        parts.append(
            f"## {title}\n\n" + "\n".join(f"- [{_title(docs / path)}]({path})" for path in _paths(entry)) + "\n"
        )
    return "\n".join(parts)


def _paths(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from _paths(inner)
    else:
        for inner in entry:
            yield from _paths(inner)


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0].replace("`", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
