"""A worker's place, from the variables of its launcher."""

from __future__ import annotations

import re

import pytest

from lockstep.errors import WorldError
from lockstep.world import Place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in TORCHRUN.items() if key != name}


ONE_WORKER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        pytest.param({}, Place(), id="nothing"),
        pytest.param({"PATH": "/bin", "OMP_NUM_THREADS": "1"}, Place(0, 1, 0, 1, 0, "none"), id="other variables"),
        # Set in some clusters' login shells; without a rank they start nothing.
        pytest.param({"MASTER_ADDR": "node0", "WORLD_SIZE": "4"}, Place(), id="no rank"),
        pytest.param(TORCHRUN, Place(5, 8, 1, 4, 1, "torchrun"), id="torchrun"),
        pytest.param({**TORCHRUN, **ONE_WORKER}, Place(0, 1, 0, 1, 0, "torchrun"), id="one worker"),
        pytest.param(_without("TORCHELASTIC_RUN_ID"), Place(5, 8, 1, 4, 1, "torchrun"), id="no run id"),
    ],
)
def test_the_place_is_what_the_launcher_said(environment: dict[str, str], place: Place) -> None:
    assert Place.from_environment(environment) == place


@pytest.mark.parametrize("missing", [name for name in TORCHRUN if name != "TORCHELASTIC_RUN_ID"])
def test_an_incomplete_set_of_variables_names_what_is_missing(missing: str) -> None:
    with pytest.raises(WorldError, match=rf", {missing} not set") as caught:
        Place.from_environment(_without(missing))
    remedy = str(caught.value).rpartition("unset ")[2]
    assert set(remedy.split()) | {"TORCHELASTIC_RUN_ID"} == set(TORCHRUN) - {missing}


@pytest.mark.parametrize("left", ["RANK", "TORCHELASTIC_RUN_ID"])
def test_a_single_variable_left_behind_is_named(left: str) -> None:
    with pytest.raises(WorldError, match=rf"\b{left}\b.*unset {left}"):
        Place.from_environment({left: "0"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
@pytest.mark.parametrize("value", ["", "first", "1.0", "0x1"])
def test_what_is_no_number_is_shown(name: str, value: str) -> None:
    with pytest.raises(WorldError, match=re.escape(f"{name}={value!r}")):
        Place.from_environment({**TORCHRUN, name: value})


@pytest.mark.parametrize(
    "contradiction",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "3"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"GROUP_RANK": "-1"},
    ],
    ids=lambda row: "=".join(next(iter(row.items()))),
)
def test_a_contradiction_shows_the_variables(contradiction: dict[str, str]) -> None:
    environment = {**TORCHRUN, **contradiction}
    with pytest.raises(WorldError, match="contradict") as caught:
        Place.from_environment(environment)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        assert f"{name}={environment[name]}" in str(caught.value)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(("launcher", "variables"), [("Open MPI", OPEN_MPI), ("MPICH", MPICH)])
def test_workers_of_mpirun_know_their_place(launcher: str, variables: dict[str, str]) -> None:
    assert Place.from_environment(variables) == Place(5, 8, 1, 4, 1, launcher)
    first = next(iter(variables))
    with pytest.raises(WorldError, match="incomplete"):
        Place.from_environment({first: variables[first]})
    with pytest.raises(WorldError, match=f"contradict each other: {first}=9"):
        Place.from_environment({**variables, first: "9"})
    with pytest.raises(WorldError, match=f"whole numbers: {first}='x'"):
        Place.from_environment({**variables, first: "x"})
