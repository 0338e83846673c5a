"""Metadata of this distribution: the version of Lockstep beside it, and exactly that Lockstep as a requirement.

In a source distribution, both are in PKG-INFO, and the build does not ask here.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class VersionOfLockstep(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        source = Path(self.root).parents[1] / "src" / "lockstep" / "__init__.py"
        if not source.is_file():
            raise FileNotFoundError(f"{source}: build lockstep-horovod in Lockstep's repository, or from its sdist")
        (version,) = re.findall(r'^__version__ = "(.+)"$', source.read_text("utf-8"), flags=re.MULTILINE)
        metadata["version"] = version
        metadata["dependencies"] = [f"lockstep-torch=={version}"]
