"""`lockstep doctor`: what this machine offers, what is wrong, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.parse import parse


@dataclass(frozen=True)
class DoctorCommand:
    """Say what this machine offers, what is wrong, and how to mend it. Exit code 1 if something is."""


def main(words: Sequence[str]) -> int:
    parse(DoctorCommand, "doctor", words)
    from rich.console import Console
    from rich.table import Table

    from lockstep.cli.checkup import examine

    table = Table("what", "here", "", show_edge=False)
    findings = examine()
    for finding in findings:
        table.add_row(finding.subject, finding.found, "[red]mend[/]" if finding.remedy else "ok")
    console = Console()
    console.print(table)
    troubles = [finding for finding in findings if finding.remedy]
    for finding in troubles:
        console.print(f"{finding.subject}: {finding.remedy}", highlight=False, markup=False, soft_wrap=True)
    if not troubles:
        console.print("Nothing is wrong.")
    return 1 if troubles else 0
