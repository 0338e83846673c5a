"""Build both distributions, check them, and run the README's first command from their wheels.

    python tools/release.py                  # needs uv and a package index; the files are in dist/
    python tools/release.py --publish        # also what an upload needs: a clean tree, a date, addresses, a new tag

.ci/run does the first, and .github/workflows/release.yml the second.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT, ROOT / "compat" / "horovod")
MAX_CHANGELOG_LINES = 60
HOROVOD_SCRIPT = """
import horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item() == 3, "the sum over two workers is wrong"
"""


class ReleaseError(Exception):
    """Why this tree cannot be released, with the fix."""


def version() -> str:
    """Return `__version__`, the only place of the version."""
    source = (ROOT / "src" / "lockstep" / "__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    return str(found)


def first_command() -> list[str]:
    """Return the first command under the README's "Two commands", without what installs Lockstep."""
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Two commands\n")[2]
    command = re.search(r"^```sh\n.*uv run (lockstep .*)$", section, flags=re.MULTILINE)
    if command is None:
        raise ReleaseError('README.md: the first block under "Two commands" has no `uv run lockstep ...`')
    return shlex.split(command[1])


def check_texts(version: str, changelog: str, citation: str) -> None:
    """Check that the texts describe this version.

    Raises:
        ReleaseError: A text is of another version, or the section of the changelog is missing or too long.
    """
    section = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", changelog, flags=re.MULTILINE | re.DOTALL)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md: write a section `## {version}`")
    lines = len(section[0].rstrip().splitlines())
    if lines > MAX_CHANGELOG_LINES:
        raise ReleaseError(f"CHANGELOG.md: the section {version} has {lines} lines; keep {MAX_CHANGELOG_LINES}")
    if f"\nversion: {version}\n" not in citation:
        raise ReleaseError(f"CITATION.cff: write `version: {version}`")


def obstacles(version: str, changelog: str, project: dict[str, object], changed: str, tags: list[str]) -> Iterator[str]:
    """Yield what speaks against an upload, each with the fix."""
    if changed:
        yield f"the tree has changes; commit them:\n{changed}"
    if not re.search(rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", changelog, flags=re.MULTILINE):
        yield f"CHANGELOG.md: date the section, `## {version}, YYYY-MM-DD`"
    if not project.get("urls"):
        yield "pyproject.toml: add [project.urls] with the addresses of the repository and the documentation"
        yield "README.md, compat/horovod/README.md: start their links with that address; PyPI follows no relative link"
    if f"v{version}" in tags:
        yield f"v{version} is tagged; raise __version__ in src/lockstep/__init__.py"


def check_upload(version: str, changelog: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changed, tags = (_output("git", *words) for words in (("status", "--porcelain"), ("tag", "--list")))
    found = list(obstacles(version, changelog, project, changed, tags.split()))
    if found:
        raise ReleaseError("\n".join(found))


def build(sources: tuple[Path, ...], out: Path) -> list[Path]:
    """Build source distributions, and wheels from them alone; return the files."""
    for source in sources:
        _run("uv", "build", "--quiet", "--out-dir", out, source)
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def build_again(files: list[Path], folder: Path) -> list[Path]:
    """Build the same from the unpacked source distributions, in another folder."""
    for file in files:
        if file.suffix == ".gz":
            with tarfile.open(file) as archive:
                archive.extractall(folder / "sources", filter="data")
    return build(tuple(sorted((folder / "sources").iterdir())), folder / "dist")


def check_equal(first: list[Path], second: list[Path]) -> None:
    """Check that two builds have the same names and bytes.

    Raises:
        ReleaseError: They differ.
    """
    names, again = ({path.name: path.read_bytes() for path in files} for files in (first, second))
    different = sorted(name for name in names.keys() | again.keys() if names.get(name) != again.get(name))
    if different:
        raise ReleaseError(f"built twice, these files differ: {', '.join(different)}")


def try_wheels(wheels: list[Path], folder: Path) -> None:
    """Install the wheels into an empty environment; train as the README does, report, and run a Horovod script."""
    environment, place = folder / "environment", folder / "empty"
    place.mkdir()
    _run("uv", "venv", "--quiet", "--no-project", "--python", sys.executable, environment)
    _run("uv", "pip", "install", "--quiet", "--python", environment, *wheels)
    variables = {**os.environ, "PATH": os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        variables.pop(name, None)
    report = ["lockstep", "report", "runs", "-o", "report"]
    for command in (first_command(), report, ["horovodrun", "-np", "2", "python", "-c", HOROVOD_SCRIPT]):
        print(f"$ {shlex.join(command)}", flush=True)
        subprocess.run([environment / "bin" / command[0], *command[1:]], cwd=place, env=variables, check=True)


def release(out: Path, publish: bool) -> None:
    """Do everything but the upload.

    Raises:
        ReleaseError: The tree cannot be released.
        subprocess.CalledProcessError: A step fails; it has printed why.
    """
    changelog, citation = ((ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    check_texts(version(), changelog, citation)
    if publish:
        check_upload(version(), changelog)
    for old in [*out.glob("lockstep_*.whl"), *out.glob("lockstep_*.tar.gz")]:
        old.unlink()
    files = build(SOURCES, out)
    with TemporaryDirectory(prefix="lockstep-release-") as name:
        folder = Path(name)
        check_equal(files, build_again(files, folder))
        _run("uv", "tool", "run", "--quiet", "twine", "check", "--strict", *files)
        try_wheels([file for file in files if file.suffix == ".whl"], folder)
    print("\n".join(str(file) for file in files))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build both distributions, check them, and run the first command.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)")
    parser.add_argument("--publish", action="store_true", help="check what an upload needs, too")
    parser.add_argument("--version", action="store_true", help="print the version, and do nothing else")
    arguments = parser.parse_args()
    if arguments.version:
        print(version())
        return 0
    try:
        release(arguments.out, arguments.publish)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed with exit code {error.returncode}: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
