"""`lockstep sites`: list the site profiles, or show one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import described, find_site, site_named, sites


@dataclass(frozen=True)
class SitesCommand:
    """List the profiles of computing centers, with * at the one that this machine matches, or show one.

    Examples:
        lockstep sites
        lockstep sites frontier
    """

    name: Annotated[Positional[str], arg(metavar="NAME|FILE")] = ""
    """Profile to show."""


def main(arguments: Sequence[str]) -> int:
    command = parse(SitesCommand, "sites", arguments)
    if command.name:
        for key, value in described(site_named(command.name, os.environ, command.name)):
            print(f"{key:11} {value}")
        return 0
    try:
        here = find_site(None, os.environ, names_of_this_machine())
    except ConfigError as error:
        here = None
        print(f"# {error}")
    for name, site in sites(os.environ).items():
        print(f"{'*' if here and here.name == name else ' '} {name:11} {site.about} ({site.date})")
    return 0
