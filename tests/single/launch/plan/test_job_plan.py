"""Launch options, the plan derived from them, and its time limits."""

from __future__ import annotations

import socket
import sys
from contextlib import nullcontext
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from name_service import Know

from lockstep.errors import ConfigError
from lockstep.launch.plan.containers import Container
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import (
    HOROVOD_VARIABLES,
    NODE_MODULE,
    STAGER_MODULE,
    JobPlan,
    Kind,
    Transport,
    describe_plan,
    plan_job,
    plan_local,
    start_command,
)
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.timings import ORDERS, Timings
from lockstep.launch.plan.worker_variables import handed_on, horovod_variables
from lockstep.world.accelerator import VISIBLE
from lockstep.world.interfaces import LOOPBACK_INTERFACE

COMMAND = ("python", "-m", "lockstep", "train", "digits")


@pytest.mark.parametrize(
    ("workers", "cores", "environment", "variables", "notes"),
    [
        (1, 2, {}, {"OMP_NUM_THREADS": "2"}, ["1 worker on this machine, 2 threads each (2 cores / 1 worker)"]),
        (2, 8, {}, {"OMP_NUM_THREADS": "4"}, ["2 workers on this machine, 4 threads each (8 cores / 2 workers)"]),
        (2, 2, {}, {"OMP_NUM_THREADS": "1"}, ["2 workers on this machine, 1 thread each (2 cores / 2 workers)"]),
        (3, 8, {"OMP_NUM_THREADS": "5"}, {}, ["3 workers on this machine, 5 threads each (from OMP_NUM_THREADS)"]),
        (
            5,
            2,
            {},
            {"OMP_NUM_THREADS": "1"},
            [
                "5 workers on this machine, 1 thread each (2 cores / 5 workers)",
                "warning: 5 workers share 2 cores and will slow each other down",
            ],
        ),
    ],
    ids=[
        "one worker has all cores",
        "threads are shared out",
        "a core for each",
        "the user's threads are kept",
        "more workers than cores",
    ],
)
def test_a_local_job(
    workers: int, cores: int, environment: dict[str, str], variables: dict[str, str], notes: list[str]
) -> None:
    plan = plan_local(workers, list(COMMAND), cores, environment)
    assert plan.command == COMMAND
    ((host, count, start, stager),) = [(node.host, node.workers, node.start, node.stager) for node in plan.nodes]
    assert (host, count) == ("localhost", workers)
    assert (start, stager) == tuple((sys.executable, "-P", "-m", each) for each in (NODE_MODULE, STAGER_MODULE))
    assert plan.is_local
    assert plan.environment == {**HOROVOD_VARIABLES, **variables}
    assert list(plan.notes) == notes


def test_a_job_on_several_hosts_keeps_their_order_and_slots() -> None:
    hosts = [Host("b", 1), Host("a", 4), Host("here", 2)]
    plan = plan_job(COMMAND, hosts, Transport("ssh", "/opt/python", ("-p2222",)), 8, {}, frozenset({"here"}))
    assert [(node.host, node.workers, node.is_here) for node in plan.nodes] == [
        ("b", 1, False),
        ("a", 4, False),
        ("here", 2, True),
    ]
    assert plan.workers == 7
    assert not plan.is_local
    assert plan.notes == ("7 workers: 1 on b, 4 on a, 2 on here",)
    assert plan.nodes[0].start[0] == "ssh"
    assert "-p2222" in plan.nodes[0].start
    assert plan.nodes[0].start[-2:] == ("b", f"exec /opt/python -P -m {NODE_MODULE}")
    assert plan.nodes[2].start == (sys.executable, "-P", "-m", NODE_MODULE)


def test_ssh_checks_host_keys_as_it_is_configured() -> None:
    plan = plan_job(COMMAND, [Host("a", 1), Host("b", 1)], Transport("ssh"), 8, {})
    words = " ".join(plan.nodes[0].start).lower()
    assert not [option for option in ("hostkeychecking", "knownhosts", "hostkeyalias") if option in words]


def test_one_machine_under_two_names_is_refused(names: Know) -> None:
    names({"a": "10.0.0.1", "a.x.org": "10.0.0.1", "a.y.org": "10.0.0.2"})
    plan = plan_job(COMMAND, [Host(name, 1) for name in ("a.x.org", "a.y.org", "b")], Transport("ssh"), 8, {})
    assert len(plan.nodes) == 3
    with pytest.raises(ConfigError, match=r"^a and a\.X\.org are one machine, listed twice among the hosts"):
        plan_job(COMMAND, [Host("a", 1), Host("a.y.org", 1), Host("a.X.org", 1)], Transport("ssh"), 8, {})


def test_addresses_are_not_looked_up(names: Know) -> None:
    asked = names({})
    hosts = ("me@10.0.0.1", "me@10.0.0.2", "10.0.0.3")
    assert len(plan_job(COMMAND, [Host(name, 1) for name in hosts], Transport("ssh"), 8, {}).nodes) == 3
    assert not asked


@pytest.mark.parametrize("container", ["", "image.sif"])
def test_script_is_checked_only_where_it_runs(container: str, tmp_path: Path) -> None:
    image = Container(container, "apptainer", str(tmp_path), str(tmp_path)) if container else None
    plan = plan_job([sys.executable, "nosuch.py"], [Host("localhost", 2)], Transport("local", container=image), 8, {})
    with nullcontext() if container else pytest.raises(ConfigError, match=r"^nosuch\.py: no such file"):
        plan.check_program()


def test_hosts_without_slots_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("login slots=0\na slots=2\n")
    lsf = {"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "login 0 a 2"}
    assert _shape(_plan(LaunchOptions(hosts="login:0,a:2"))) == [("a", 2, "ssh")]
    assert _shape(_plan(LaunchOptions(hosts="login:0,a:2"), 1)) == [("a", 1, "ssh")]
    assert _shape(_plan(LaunchOptions(hosts="login:0,localhost:2"))) == [("localhost", 2, "python")]
    assert _shape(_plan(LaunchOptions(hostfile=tmp_path / "hosts"))) == [("a", 2, "ssh")]
    assert _shape(_plan(LaunchOptions(), environment=lsf)) == [("a", 2, "blaunch")]
    assert _shape(_plan(LaunchOptions(), 3, environment=lsf)) == [("a", 3, "blaunch")]


def test_idle_nodes_of_an_allocation_are_noted() -> None:
    environment = {**SLURM, "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu1"}
    all_used, one_idle = (_plan(LaunchOptions(), workers, environment=environment).notes for workers in (None, 4))
    assert [note.partition(" ")[0] for note in all_used[1:]] == ["warning:"]
    assert [note.partition(" ")[0] for note in one_idle[1:]] == ["idle:", "warning:"]
    assert not _plan(LaunchOptions(hosts="n1:4"), environment=environment).notes[1:]


def test_several_names_of_this_machine_are_one_node() -> None:
    names = frozenset({"localhost", "here"})
    plan = plan_job(COMMAND, [Host("localhost", 1), Host("here", 2)], Transport("ssh"), 8, {}, names)
    assert [node.workers for node in plan.nodes] == [3]
    for twice, message in (
        ("a,b,A", "A is listed twice"),
        ("a,b,a", "a is listed twice"),
        ("here,b,localhost", "are this machine"),
    ):
        hosts = [Host(name, 1) for name in twice.split(",")]
        with pytest.raises(ConfigError, match=message):
            plan_job(COMMAND, hosts, Transport("ssh"), 8, {}, names)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("slurm", "srun", "--nodelist=n1"), ("lsf", "blaunch", "n1"), ("mpi", "mpiexec", "n1"), ("pbs", "ssh", "n1")],
)
def test_batch_systems_have_ways_of_their_own(kind: Kind, first: str, last: str) -> None:
    words = start_command(Transport(kind, program="mpiexec"), "n1", is_here=False)
    assert words[0] == first
    assert last in words
    assert words[-1].endswith(NODE_MODULE)


def test_interface_of_a_local_job_is_this_machines_loopback() -> None:
    assert LOOPBACK_INTERFACE in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("cores", [1, 2, 7, 64])
@pytest.mark.parametrize("workers", [1, 2, 7, 64])
def test_threads_never_exceed_the_cores_nor_vanish(workers: int, cores: int) -> None:
    threads = int(plan_local(workers, COMMAND, cores, {}).environment["OMP_NUM_THREADS"])
    assert threads >= 1
    assert threads * workers <= max(cores, workers)
    assert (threads + 1) * workers > cores


def test_torchruns_variables_have_horovods_names_too() -> None:
    worker = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    worker |= {"GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert horovod_variables(worker, slots=[3, 1, 2]) == {
        "HOROVOD_RANK": "5",
        "HOROVOD_SIZE": "6",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",  # of the nodes that have such a worker
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29500",
    }


def test_what_is_a_hosts_own_is_not_handed_on_to_another() -> None:
    own = {"HOME": "/root", "TMPDIR": "/tmp", "SSH_CONNECTION": "x", "CUDA_VISIBLE_DEVICES": "1", "SLURM_PROCID": "0"}
    own |= {"BASH_FUNC_module%%": "() {}", "OLDPWD": "/", **dict.fromkeys(VISIBLE, "1")}
    kept = {"PATH": "/bin", "PYTHONPATH": "/x", "SLURM_JOB_ID": "7", "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}
    assert handed_on({**own, **kept}, elsewhere=True) == kept


def test_all_but_the_launchers_own_rank_info_is_handed_on() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "BASH_FUNC_module%%": "() {}", "OLDPWD": "/"}
    kept |= {"HOROVOD_FUSION_THRESHOLD": "0"}
    dropped = {"RANK": "1", "HOROVOD_RANK": "1", "HOROVOD_ELASTIC": "1"}
    assert handed_on({**kept, **dropped}) == kept


SCRIPT_COMMAND = ["python", "train.py"]
HERE = frozenset({"localhost", "here"})
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
SLURM |= {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}


def _plan(
    options: LaunchOptions, workers: int | None = None, gpus: int = 0, environment: dict[str, str] | None = None
) -> JobPlan:
    return plan_from(options, workers, SCRIPT_COMMAND, environment or {}, 8, lambda: gpus, HERE)


def _shape(plan: JobPlan) -> list[tuple[str, int, str]]:
    return [(node.host, node.workers, Path(node.start[0]).name.rstrip("0123456789.")) for node in plan.nodes]


def test_without_hosts_a_job_is_here_with_a_worker_a_gpu() -> None:
    assert _shape(_plan(LaunchOptions())) == [("localhost", 1, "python")]
    assert _shape(_plan(LaunchOptions(), gpus=4)) == [("localhost", 4, "python")]
    assert _shape(_plan(LaunchOptions(), workers=3, gpus=4)) == [("localhost", 3, "python")]


def test_hosts_keep_their_order_and_only_the_slots_needed(tmp_path: Path) -> None:
    assert _shape(_plan(LaunchOptions(hosts="b:4,a:2"))) == [("b", 4, "ssh"), ("a", 2, "ssh")]
    assert _shape(_plan(LaunchOptions(hosts="b:4,a:2"), workers=5)) == [("b", 4, "ssh"), ("a", 1, "ssh")]
    assert _shape(_plan(LaunchOptions(hosts="b:4,a:2"), workers=4)) == [("b", 4, "ssh")]
    assert _shape(_plan(LaunchOptions(hosts="here:1,localhost:2"))) == [("here", 3, "python")]
    (tmp_path / "hosts").write_text("b slots=1\nhere slots=2\n")
    assert _shape(_plan(LaunchOptions(hostfile=tmp_path / "hosts"))) == [("b", 1, "ssh"), ("here", 2, "python")]


def test_an_allocation_is_used_whole_through_its_own_launcher() -> None:
    assert _shape(_plan(LaunchOptions(), environment=SLURM)) == [("n1", 4, "srun"), ("n2", 4, "srun")]
    assert _shape(_plan(LaunchOptions(), workers=6, environment=SLURM)) == [("n1", 4, "srun"), ("n2", 2, "srun")]
    assert _shape(_plan(LaunchOptions(), workers=10, environment=SLURM)) == [("n1", 5, "srun"), ("n2", 5, "srun")]
    assert _shape(_plan(LaunchOptions(launcher="local"), workers=2, environment=SLURM)) == [("localhost", 2, "python")]
    assert _shape(_plan(LaunchOptions(launcher="ssh", hosts="n2:1"), environment=SLURM)) == [("n2", 1, "ssh")]


def test_manually_started_nodes() -> None:
    plan = _plan(LaunchOptions(nodes=3, node_rank=1, master_addr="a", master_port=29777), workers=2)
    assert plan.manual
    assert (plan.manual.node, plan.manual.nodes, plan.manual.address, plan.manual.port) == (1, 3, "a", 29777)
    assert plan.workers == 2
    assert plan.notes == ("node 1 of 3, 2 workers here; connecting at a:29777",)
    assert not plan.is_local
    plan = _plan(LaunchOptions(dist_url="tcp://10.0.0.1:23456", world_size=2, rank=0), gpus=4)
    assert plan.manual
    assert (plan.manual.address, plan.manual.port, plan.workers) == ("10.0.0.1", 23456, 4)
    (note,) = _plan(LaunchOptions(nodes=2, node_rank=0, master_addr="a"), workers=1).notes
    assert note.startswith("node 0 of 2, 1 worker here; ")


@pytest.mark.parametrize(
    ("options", "workers", "message"),
    [
        (LaunchOptions(hosts="a:2"), 3, "-np 3, but the hosts have 2 slots"),
        (LaunchOptions(hosts="a:0,b:0"), None, "^no host has slots; give a number above 0, as in host:2$"),
        (LaunchOptions(hosts="a:2"), 0, "-np 0: must be at least 1"),
        (LaunchOptions(hosts="a:1,b:1,a:1"), None, "a is listed twice"),
        (LaunchOptions(hosts="a:1", hostfile=Path("f")), None, "--hosts and --hostfile both"),
        (LaunchOptions(hostfile=Path("/no/such")), None, "--hostfile /no/such: No such file"),
        (LaunchOptions(launcher="slurm"), None, "--launcher slurm: not in an allocation of this system"),
        (LaunchOptions(launcher="local", hosts="a:1"), None, "a is not this machine"),
        (LaunchOptions(nodes=2), None, "--nodes needs --node-rank"),
        (LaunchOptions(nodes=2, node_rank=2, master_addr="a"), None, "--node-rank 2: must be from 0 to 1"),
        (LaunchOptions(nodes=2, node_rank=0, master_addr="a", master_port=70000), None, "70000: invalid port"),
        (LaunchOptions(nodes=2, node_rank=0, master_addr="a", hosts="a:1"), None, "cannot be combined with -H"),
        (LaunchOptions(master_addr="a"), None, "--master-addr needs --nodes"),
        (LaunchOptions(dist_url="a:1"), None, "is not of the form tcp://HOST:PORT"),
        (LaunchOptions(dist_url="tcp://a:1"), None, "--dist-url needs --world-size"),
        (LaunchOptions(dist_url="tcp://a:1", world_size=2, rank=0, nodes=2), None, "cannot be combined with --nodes"),
        (LaunchOptions(rank=0), None, "--world-size and --rank need --dist-url"),
    ],
)
def test_contradictions_are_named(options: LaunchOptions, workers: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(options, workers)


@pytest.mark.parametrize(
    ("flag", "variable", "hosts_answer", "workers_wait"),
    [
        (None, None, 120.0, None),
        (300.0, None, 300.0, None),  # less than workers wait by themselves
        (900.0, None, 900.0, "900"),
        (None, "50", 50.0, None),  # the workers read it themselves
        (900.0, "50", 900.0, "900"),
    ],
)
def test_the_start_has_one_limit_for_hosts_and_workers(
    flag: float | None, variable: str | None, hosts_answer: float, workers_wait: str | None
) -> None:
    environment = {"HOROVOD_START_TIMEOUT": variable} if variable else {}
    plan = plan_from(LaunchOptions(start_timeout=flag), 2, ["true"], environment, 8, lambda: 0, frozenset({"here"}))
    assert plan.start_timeout == hosts_answer
    assert plan.environment.get("HOROVOD_START_TIMEOUT") == workers_wait


def test_a_dry_run_shows_each_worker() -> None:
    text = describe_plan(_plan(LaunchOptions(hosts="b:2,here:1", ssh_option="-p 2222", python="/opt/python")))
    assert text.splitlines()[0] == "# 3 workers: 2 on b, 1 on here"
    assert "# node 1 of 2: here" in text
    assert "ssh -T -p 2222 -o BatchMode=yes" in text
    assert " b 'exec /opt/python -P -m lockstep.launch.node'" in text
    assert "  export WORLD_SIZE=3" in text
    own = [line.strip() for line in text.splitlines() if line.startswith("  RANK=")]
    assert own == [
        "RANK=0 LOCAL_RANK=0 ROLE_RANK=0 HOROVOD_RANK=0 HOROVOD_LOCAL_RANK=0 "
        "HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=2 python train.py",
        "RANK=1 LOCAL_RANK=1 ROLE_RANK=1 HOROVOD_RANK=1 HOROVOD_LOCAL_RANK=1 "
        "HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=1 python train.py",
        "RANK=2 LOCAL_RANK=0 ROLE_RANK=2 HOROVOD_RANK=2 HOROVOD_LOCAL_RANK=0 "
        "HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 python train.py",
    ]


@pytest.mark.parametrize("pair", [pair for names in ORDERS for pair in pairwise(names)])
def test_time_as_long_as_one_that_must_outlast_it_is_refused(pair: tuple[str, str]) -> None:
    shorter, longer = pair
    with pytest.raises(ValueError, match=r"must be (shorter|longer) than"):
        Timings(**{shorter: getattr(Timings(), longer)})


@pytest.mark.parametrize("name", [each.name for each in fields(Timings)])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_every_time_is_positive(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        Timings(**{name: seconds})


def test_launchers_caller_waits_longer_than_the_launcher() -> None:
    """It ends the workers, then by force, and then closes its node processes."""
    with pytest.raises(ValueError, match="caller_end must be longer"):
        Timings(caller_end=12.0)


def test_lost_hosts_workers_end_within_the_documented_time() -> None:
    usual = Timings()
    assert usual.silence + usual.worker_end + usual.settle < 15
