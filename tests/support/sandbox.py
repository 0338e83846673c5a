"""An empty folder in which a page's blocks run one after another, as a reader would run them."""

from __future__ import annotations

import os
import signal
import subprocess
import zipfile
from contextlib import suppress
from pathlib import Path

from commands import PROGRAMS, own_environment, write_shims
from pages import ROOT, Block
from time_limits import extended

LIMIT_SECONDS = 280
LINKED = ("benchmarks", "compat", "docs", "examples", "tests")
WARM = ("horovodrun", "lockstep", "python", "python3", "torchrun")


class Sandbox:
    """The folder, with links to the repository's folders and the data sets that the page needs.

    Args:
        cold: Start a new interpreter for each command, as a reader does.
    """

    def __init__(self, folder: Path, cold: bool = False) -> None:
        self.folder = folder / "sandbox"
        self.folder.mkdir()
        self._path = [str(PROGRAMS), os.environ["PATH"]]
        if not cold:
            write_shims(folder / "shims", *WARM)
            self._path.insert(0, str(folder / "shims"))
        for name in LINKED:
            (self.folder / name).symlink_to(ROOT / name)

    def provide(self, name: str, shared: Path) -> None:
        """Put the data set where `lockstep train` looks for it."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        if name == "mnist":
            (data / "MNIST").symlink_to(shared / "MNIST")
        elif name == "cifar10":
            with zipfile.ZipFile(shared / "cifar10-jpeg.zip") as archive:
                archive.extractall(data)
        else:
            raise ValueError(f"no data set {name!r} lies beside the project; there are mnist and cifar10")

    def run(self, block: Block) -> str:
        """Run a block of shell or Python, and return the output of both streams.

        Raises:
            AssertionError: The exit code is not that of the block's mark, or not 0 if it has none.
        """
        if "setup" in block.marks:
            self._call(["bash", "-euo", "pipefail", "-c", block.marks["setup"]], 0, f"{block}, setup")
        if block.language == "sh":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        else:
            script = self.folder / f"line_{block.line}.py"
            script.write_text(block.text)
            command = ["python", str(script)]
        return self._call(command, int(block.marks.get("exit", "0")), str(block))

    def write(self, block: Block) -> None:
        """Write the block to the file that its mark names."""
        path = self.folder / block.marks["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text + "\n")

    def _call(self, command: list[str], code: int, what: str) -> str:
        environment = own_environment(PATH=os.pathsep.join(self._path), COLUMNS="100", TERM="dumb")
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                printed, _ = extended(lambda seconds: process.communicate(timeout=seconds), LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                raise AssertionError(f"{what}: not done after {LIMIT_SECONDS} s:\n{printed}") from None
        assert process.returncode == code, f"{what}: exit code {process.returncode}, not {code}:\n{printed}"
        return printed
