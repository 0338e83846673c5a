"""Both distributions, built from their sources. tools/release.py, which .ci/run calls, installs and uses them."""

from __future__ import annotations

import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from fresh_environments import build
from pages import ROOT

import lockstep

pytestmark = pytest.mark.cold


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distributions, and the wheels that are built from them alone."""
    out = tmp_path_factory.mktemp("dist")
    build(out)
    return out


def test_each_has_its_license_its_types_and_its_data(distributions: Path) -> None:
    torch_wheel, horovod_wheel = (
        ZipFile(next(distributions.glob(f"{name}-*.whl"))).namelist() for name in ("lockstep_torch", "lockstep_horovod")
    )
    for names, package in ((torch_wheel, "lockstep"), (horovod_wheel, "horovod")):
        assert f"{package}/py.typed" in names
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        folders = {name.partition("/")[0] for name in names}
        assert all(folder == package or folder.endswith(".dist-info") for folder in folders)
    sources = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= set(torch_wheel)
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "compat" / "horovod" / "LICENSE").read_bytes()
    with tarfile.open(next(distributions.glob("lockstep_torch-*.tar.gz"))) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name or "/benchmarks/" in name]


def test_both_have_the_version_of_the_source(distributions: Path) -> None:
    wheels = sorted(distributions.glob("*.whl"))
    assert [path.name.split("-")[:2] for path in wheels] == [
        ["lockstep_horovod", lockstep.__version__],
        ["lockstep_torch", lockstep.__version__],
    ]
    with ZipFile(wheels[0]) as wheel:
        metadata = wheel.read(f"lockstep_horovod-{lockstep.__version__}.dist-info/METADATA").decode()
    assert f"\nRequires-Dist: lockstep-torch=={lockstep.__version__}\n" in metadata
