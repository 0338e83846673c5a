"""Installing over an existing torch changes no torch package, also over a center's own build of it.

The environments hold metadata alone, and the installers only plan. A center's versions come from torch's build script,
such as 2.8.0a0+git1234567, which precedes 2.8 in PEP 440.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.cold

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or "uv"
PIP = [UV, "tool", "run", "--quiet", "pip"]
REQUIREMENTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
RELEASED = [("2.8.0", "0.23.0"), ("2.8.0+cu129", "0.23.0+cu129"), ("2.10.0", "0.25.0"), ("2.15.0", "0.29.2")]
BUILT_BY_A_CENTER = [
    ("2.8.0a0+git1234567", "0.23.0a0+824e8c8"),
    ("2.8.0a0+34c6371d24.nv25.8", "0.23.0a0+428a54c9"),
    ("2.10.0a0+git1234567", "0.25.0a0+1e53952"),
]

Environment = Callable[..., Path]


def _uv(environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _run(UV, "pip", "install", "--dry-run", "--python", str(environment), *words)


def _pip(environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _run(*PIP, "--python", str(environment), "install", "--dry-run", *words)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _changes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The version to be installed of each package that would change."""
    assert done.returncode == 0, done.stderr
    planned = re.findall(r"^ \+ ([^=@\s]+)(?:==| @ )(\S+)", done.stderr, re.MULTILINE)  # uv's
    for line in re.findall(r"^Would install (.*)", done.stdout, re.MULTILINE):
        planned += [word.rsplit("-", 1) for word in line.split()]
    return {name.lower().replace("_", "-"): version for name, version in planned}


@pytest.fixture
def new_environment(tmp_path: Path) -> Environment:
    """Make an environment in which the given versions seem installed, as well as all else that Lockstep requires."""

    def new(torch: str = "", torchvision: str = "") -> Path:
        environment = tmp_path / "environment"
        done = _run(UV, "venv", "--quiet", "--no-project", "--python", sys.executable, str(environment))
        assert done.returncode == 0, done.stderr
        (packages,) = environment.glob("lib/python*/site-packages")
        names = {re.split(r"[^\w-]", requirement, maxsplit=1)[0] for requirement in REQUIREMENTS}
        versions = dict.fromkeys(names - {"torch", "torchvision"}, "99")
        for name, version in {**versions, "torch": torch, "torchvision": torchvision}.items():
            if version:
                pin = f"torch=={torch.partition('+')[0]}" if (torch, torchvision) in RELEASED else "torch"
                _write_metadata(packages, name, version, pin if name == "torchvision" else "")
        return environment

    return new


def _write_metadata(packages: Path, name: str, version: str, requirement: str) -> None:
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    if requirement:
        lines.append(f"Requires-Dist: {requirement}")
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "RECORD").write_text("")


@pytest.fixture(scope="session")
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no package index is reachable."""
    environment = tmp_path_factory.mktemp("index") / "environment"
    commands = [
        [UV, "venv", "--quiet", "--no-project", str(environment)],
        [
            UV,
            "pip",
            "install",
            "--dry-run",
            "--refresh-package",
            "hatchling",
            "--python",
            str(environment),
            "hatchling",
        ],
        [*PIP, "--version"],
    ]
    if not shutil.which("uv") or any(_run(*command).returncode for command in commands):
        pytest.skip("needs uv and a package index")


@pytest.fixture(scope="module")
def wheel(_index: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """This project's: installers build one to know what it requires, and need not do so for every test."""
    folder = tmp_path_factory.mktemp("wheel")
    done = _run(UV, "build", "--wheel", "--quiet", "--out-dir", str(folder), str(ROOT))
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return str(path)


@pytest.mark.parametrize(
    ("install", "installed"),
    [
        *((_uv, installed) for installed in RELEASED + BUILT_BY_A_CENTER),
        *((_pip, each[0]) for each in (RELEASED, BUILT_BY_A_CENTER)),
    ],
)
def test_installing_over_a_torch_changes_no_torch_package(
    new_environment: Environment,
    installed: tuple[str, str],
    install: Callable[..., subprocess.CompletedProcess[str]],
    wheel: str,
) -> None:
    assert set(_changes(install(new_environment(*installed), wheel))) == {"lockstep-torch"}


@pytest.mark.parametrize("installed", RELEASED)
def test_installed_torch_stays_and_gets_its_torchvision(
    new_environment: Environment, installed: tuple[str, str], tmp_path: Path, wheel: str
) -> None:
    torch, torchvision = installed
    held = tmp_path / "held.txt"
    held.write_text(f"torch=={torch}\n")
    changes = _changes(_uv(new_environment(torch), "-c", str(held), wheel))
    assert set(changes) - {"numpy", "pillow"} == {"lockstep-torch", "torchvision"}
    assert changes["torchvision"].rpartition(".")[0] == torchvision.partition("+")[0].rpartition(".")[0]


def test_centers_torch_build_is_refused_rather_than_replaced(
    new_environment: Environment, tmp_path: Path, wheel: str
) -> None:
    torch, _ = BUILT_BY_A_CENTER[0]
    held = tmp_path / "held.txt"
    held.write_text(f"torch=={torch}\n")
    done = _uv(new_environment(torch), "-c", str(held), wheel)
    assert done.returncode != 0
    assert "torchvision" in done.stderr


@pytest.mark.usefixtures("_index")
def test_a_torch_below_the_floor_is_replaced(new_environment: Environment) -> None:
    assert {"torch", "torchvision"} < set(_changes(_uv(new_environment("2.7.1", "0.22.1"), str(ROOT))))


@pytest.mark.usefixtures("_index")
@pytest.mark.parametrize("install", [_uv, _pip])
def test_a_fresh_installation_takes_no_pre_release(
    new_environment: Environment, tmp_path: Path, install: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for version in ("2.15.0", "2.16.0rc1"):
        with ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            folder = f"torch-{version}.dist-info"
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    (torch,) = (requirement for requirement in REQUIREMENTS if re.match(r"torch\b", requirement))
    done = install(new_environment(), "--no-index", "--find-links", str(tmp_path), torch)
    assert _changes(done) == {"torch": "2.15.0"}
