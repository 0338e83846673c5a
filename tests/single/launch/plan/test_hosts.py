"""Hosts and slots, as given to horovodrun or by a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import flux
import pytest
from name_service import Know

from lockstep.errors import ConfigError
from lockstep.launch.plan.hosts import (
    MAX_LOOKUPS,
    Host,
    find_allocation,
    is_here,
    names_of_this_machine,
    parse_discovered,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
)

pytestmark = pytest.mark.usefixtures("here")


def test_hosts_have_slots() -> None:
    assert parse_hosts("a:4,b:2, c,fe80::1") == (Host("a", 4), Host("b", 2), Host("c", 1), Host("fe80::1", 1))


def test_host_file_may_have_comments_and_mpiruns_keywords() -> None:
    text = "# nodes\na slots=4\n\nb   slots = 2 max_slots=4  # two\nc\n"
    assert parse_hostfile(text) == (Host("a", 4), Host("b", 2), Host("c", 1))


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("a:2", Host("a", 2)),
        ("me@node-1.site.org:16 max_slots=32", Host("me@node-1.site.org", 16)),
        ("fe80::1", Host("fe80::1", 1)),
        ("fe80::1 slots=2", Host("fe80::1", 2)),
        ("[fe80::1]:2", Host("fe80::1", 2)),
        ("[fe80::1]", Host("fe80::1", 1)),
        ("::1", Host("::1", 1)),
    ],
)
def test_a_host_file_may_be_a_machine_file_of_hydra(line: str, host: Host) -> None:
    assert parse_hostfile(f"{line}\nb\n") == (host, Host("b", 1))


def test_a_byte_order_mark_is_not_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\r\nb:4\r\n", encoding="utf-8-sig")
    assert read_hostfile(path) == (Host("a", 2), Host("b", 4))
    assert parse_discovered("\ufeffa:2\nb:4\n", None) == (Host("a", 2), Host("b", 4))


def test_discovered_hosts_have_a_number_or_the_default() -> None:
    assert parse_discovered("a:4\nb\n", 2) == (Host("a", 4), Host("b", 2))
    with pytest.raises(ConfigError, match="--slots-per-host"):
        parse_discovered("b\n", None)


@pytest.fixture
def lookups(names: Know) -> list[str]:
    """Makes this machine node7, whose other names some name server knows; returns the names that it is asked for."""
    own = {"node7.site.org": "10.0.0.7", "node7-mgmt": "127.0.1.1", "node7-ib": "10.1.0.7"}
    others = {"node7.b.org": "10.9.9.9", "node8": "10.0.0.8", "node8.site.org": "10.0.0.8", "node8.b.org": "10.8.8.8"}
    return names(own | others)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *((name, True) for name in ("node7", "NODE7", "localhost", "10.0.0.7", "10.1.0.7", "node7.", "::1")),
        *((name, True) for name in ("node7.site.org", "Node7.Site.Org.", "node7-mgmt", "node7-ib")),
        *((name, False) for name in ("node7.b.org", "node7-unknown", "node77", "node8", "me@node7")),
        ("node7." + 64 * "a", False),
    ],
)
def test_this_machine_is_recognized_by_any_name(name: str, own: bool, lookups: list[str]) -> None:
    assert is_here(name, names_of_this_machine()) == own


def test_only_names_like_the_own_one_are_looked_up(lookups: list[str]) -> None:
    names = names_of_this_machine()
    assert not any(is_here(f"node{number}.site.org", names) for number in range(100, 600))
    assert not lookups
    assert is_here("node7.site.org", names)
    assert is_here("node7.site.org", names)
    assert lookups == ["node7.site.org"]


def test_lookups_are_limited(lookups: list[str]) -> None:
    names = names_of_this_machine()
    assert not any(is_here(f"node7-{number}", names) for number in range(300))
    assert len(lookups) == MAX_LOOKUPS


@pytest.mark.parametrize(
    ("read", "message", "text"),
    [
        *((parse_hosts, "host:slots", text) for text in ("a:x", ":2", "a:2,", "a:-1")),
        *((parse_hostfile, "--hostfile", text) for text in ("", "# only this\n", "a slots=many\n", "a slots=1 b\n")),
        *((parse_hostfile, "--hostfile", text) for text in ("a:x\n", "a:\n", "a:-1\n", "a:2 slots=2\n")),
        *((read, None, text + "9" * 5000) for read, text in ((parse_hosts, "a:"), (parse_hostfile, "a slots="))),
    ],
)
def test_invalid_hosts_are_refused(read: Callable[[str], object], message: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize(
    "name",
    [
        *("-v", "-oProxyCommand=touch", "a b", "a\x1b[2J", "a\nb", "a\n", "", "kätzchen", "a" * 256),
        *(f"a{sign}b" for sign in "!\"#$%&'()*+,/;<=>?\\^`{|}~\x07\x7f\u202e"),
    ],
)
def test_a_name_that_ssh_or_a_shell_would_obey_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="invalid host name"):
        Host(name, 1)


def test_the_name_is_refused_wherever_it_comes_from() -> None:
    for read, text in (
        (parse_hosts, "a:1,$(touch):2"),
        (parse_hostfile, "a slots=1\n`id` slots=2\n"),
        (lambda text: parse_discovered(text, None), "a:1\nb;c:2\n"),
    ):
        with pytest.raises(ConfigError, match=r"invalid host name .*; fix -H, the host file or the discovery script"):
            read(text)


SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "hal[01-02]"}
HET = "SLURM_JOB_NODELIST_HET_GROUP_"
PBS = {"PBS_JOBID": "9.server", "PBS_NODEFILE": "nodes"}
LSF = {"LSB_JOBID": "8", "LSB_DJOB_HOSTFILE": "nodes"}
GRID_ENGINE = {"JOB_ID": "7", "PE_HOSTFILE": "nodes"}


def found(environment: Mapping[str, str], text: str = "", gpus: int = 0) -> dict[str, int]:
    """The hosts and slots of an allocation whose host file, `nodes`, holds `text`."""
    Path("nodes").write_text(text)
    allocation = find_allocation(environment, lambda: gpus)
    assert allocation
    return {host.name: host.slots for host in allocation.hosts}


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({}, (1, 1)),
        ({"SLURM_TASKS_PER_NODE": "64(x2)", "SLURM_CPUS_PER_TASK": "1"}, (1, 1)),  # CPUs: no tasks were asked for
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, (4, 4)),
        ({"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "4,3"}, (4, 3)),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "4,1", "SLURM_GPUS_ON_NODE": "8"}, (4, 1)),
        ({"SLURM_NTASKS_PER_NODE": "4"}, (4, 4)),
        ({"SLURM_GPUS_ON_NODE": "4"}, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:2"}, (6, 6)),
        ({"SLURM_GPUS": "h100:8"}, (4, 4)),
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, (4, 4)),
        # One task a node, as jobs for torchrun have it, says nothing of the workers.
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}, (4, 4)),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_CPUS_PER_TASK": "16"}, (1, 1)),
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_NODE": "2"}, (4, 4)),
        # A shell in a step of one node.
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "4"}, (4, 4)),
    ],
)
def test_slurm_starts_its_tasks_or_one_worker_a_gpu(more: dict[str, str], slots: tuple[int, int]) -> None:
    assert found(SLURM | more) == dict(zip(("hal01", "hal02"), slots, strict=True))


@pytest.mark.parametrize(
    ("environment", "used", "lines"),
    [
        (SLURM, "hal01 hal02", []),
        (SLURM, "hal01", ["idle: 1 of 2 nodes of the Slurm job have no worker; -np 2 uses all"]),
        (
            SLURM | {"SLURM_JOB_NODELIST": "hal[1-9]", "SLURM_NTASKS_PER_NODE": "4"},
            "hal1",
            ["idle: 8 of 9 nodes of the Slurm job have no worker; -np 36 uses all"],
        ),
        # As in sbatch's script of a heterogeneous job, and in a step of all its components.
        (
            SLURM | {f"{HET}0": "hal[01-02]", f"{HET}1": "gpu[1-3]", f"{HET}2": "big"},
            "hal01 hal02",
            [
                "warning: nodes of the Slurm job are not used: component 1 (gpu[1-3]), component 2 (big); start the "
                "workers with `srun --het-group`, or list all hosts with -H"
            ],
        ),
        (SLURM | {f"{HET}0": "hal01", f"{HET}1": "hal02"}, "hal01 hal02", []),
    ],
)
def test_nodes_without_workers_are_named(environment: dict[str, str], used: str, lines: Sequence[str]) -> None:
    allocation = find_allocation(environment)
    assert allocation
    assert allocation.idle([Host(name, 1) for name in used.split()]) == lines


@pytest.mark.parametrize(
    ("environment", "system"),
    [(PBS, "PBS"), (LSF, "LSF"), ({"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "a 1"}, "LSF"), (GRID_ENGINE, "Grid Engine")],
)
def test_scheduler_is_recognized_by_its_variables(environment: dict[str, str], system: str) -> None:
    Path("nodes").write_text("a 1" if system == "Grid Engine" else "a")
    allocation = find_allocation(environment)
    assert allocation
    assert (allocation.system, allocation.hosts) == (system, (Host("a", 1),))


@pytest.mark.parametrize(
    ("environment", "text", "gpus", "hosts"),
    [
        (PBS, "a\na\nb\nb\n", 0, {"a": 2, "b": 2}),
        (PBS, "b\na\nb\n\n", 0, {"b": 2, "a": 1}),
        (PBS | {"NCPUS": "64"}, "a\nb\n", 0, {"a": 1, "b": 1}),
        (PBS | {"PBS_NUM_PPN": "4"}, "a\nb\n", 0, {"a": 4, "b": 4}),
        (PBS | {"PBS_NUM_PPN": "2"}, "a\na\nb\nb\n", 0, {"a": 2, "b": 2}),
        (PBS, "a\nb\n", 4, {"a": 4, "b": 4}),
        (PBS, "a\n" * 32 + "b\n" * 32, 4, {"a": 4, "b": 4}),  # cores
        (PBS, "a\na\nb\nb\n", 4, {"a": 2, "b": 2}),  # mpiprocs=2
        (PBS, "a\na\nb\n", 4, {"a": 2, "b": 1}),
        (LSF, "a\na\nb\n", 0, {"a": 2, "b": 1}),
        (LSF | {"LSB_MCPU_HOSTS": "x 3"}, "a\na\nb\n", 0, {"a": 2, "b": 1}),
        (LSF, "c1\nc1\nc2\nc2\n", 0, {"c1": 2, "c2": 2}),
        ({"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "c1 42 c2 42 "}, "", 0, {"c1": 42, "c2": 42}),
        ({"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "c1 1 c2 4"}, "", 0, {"c1": 1, "c2": 4}),
        (GRID_ENGINE, "a 2 all.q@a UNDEFINED\nb 3 all.q@b <NULL>\n", 0, {"a": 2, "b": 3}),
        (GRID_ENGINE, "a 2 all.q@a UNDEFINED\na 1 gpu.q@a UNDEFINED\n", 0, {"a": 3}),
        (GRID_ENGINE, "a 16 all.q@a UNDEFINED\n", 2, {"a": 2}),
        ({"LSB_DJOB_HOSTFILE": "/nowhere/hosts", "LSB_MCPU_HOSTS": "a 2 b 2"}, "", 0, {"a": 2, "b": 2}),
    ],
)
def test_host_files_give_hosts_and_slots(
    environment: dict[str, str], text: str, gpus: int, hosts: dict[str, int]
) -> None:
    assert list(found(environment, text, gpus).items()) == list(hosts.items())


@pytest.mark.parametrize("variables", [{}, {"FLUX_JOB_ID": flux.JOB}], ids=["batch script", "task"])
def test_flux_lists_the_hosts_of_a_job(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**flux.use(tmp_path, "tuolumne[1001-1002]", monkeypatch), **variables}
    assert found(environment) == {"tuolumne1001": 1, "tuolumne1002": 1}
    assert found(environment, gpus=4) == {"tuolumne1001": 4, "tuolumne1002": 4}
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"`flux .*`: No such file or directory; use -H"):
        find_allocation(environment)


def test_a_flux_instance_without_a_job_is_not_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.use(tmp_path, "", monkeypatch)
    assert find_allocation({"FLUX_URI": "local:///run/flux/local"}) is None


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "1"}, {"PBS_JOBID": "1"}, {"JOB_ID": "1"}])
def test_no_allocation_is_found_outside_of_one(environment: dict[str, str]) -> None:
    assert find_allocation(environment) is None


@pytest.mark.parametrize(
    ("environment", "text", "message"),
    [
        (SLURM | {"SLURM_JOB_NODELIST": "hal[01"}, "", r"SLURM_JOB_NODELIST: 'hal\[01' is not"),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "x"}, "", "SLURM_TASKS_PER_NODE: 'x' is not"),
        (SLURM | {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}, "", "has 3 nodes, but SLURM_JOB_NODELIST"),
        (SLURM | {"SLURM_GPUS_PER_NODE": "many"}, "", "SLURM_GPUS_PER_NODE=many is not a number"),
        (SLURM | {"SLURM_GPUS": "5"}, "", "5 GPUs on 2 nodes.*--gpus-per-node"),
        (SLURM | {"SLURM_GPUS": "6", "SLURM_GPUS_ON_NODE": "4"}, "", "6 GPUs on 2 nodes.*--gpus-per-node"),
        (PBS, "", "PBS_NODEFILE=nodes contains no host"),
        (PBS, "a slots=4\n", "PBS_NODEFILE=nodes: 'a slots=4'"),
        (GRID_ENGINE, "a\n", "PE_HOSTFILE=nodes: 'a'"),
        (GRID_ENGINE, "a b c d\n", "PE_HOSTFILE=nodes: 'a b c d'"),
        ({"LSB_MCPU_HOSTS": "a 1 b"}, "", "LSB_MCPU_HOSTS='a 1 b'"),
        ({"LSB_MCPU_HOSTS": "a b"}, "", "LSB_MCPU_HOSTS='a b'"),
    ],
)
def test_what_is_malformed_is_named(environment: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(environment, text)


def test_a_host_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"):
        with pytest.raises(ConfigError, match=f"{variable}=.*gone cannot be read: No such file"):
            find_allocation({variable: str(tmp_path / "gone")})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        find_allocation({"PBS_NODEFILE": str(tmp_path / "binary")})
