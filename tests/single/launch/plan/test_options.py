"""From what a user says of hosts to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan.job_plan import JobPlan, describe_plan
from lockstep.launch.plan.options import LaunchOptions, plan_from

COMMAND = ["python", "train.py"]
HERE = frozenset({"localhost", "here"})
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
SLURM |= {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}


def _plan(
    options: LaunchOptions, workers: int | None = None, gpus: int = 0, environment: dict[str, str] | None = None
) -> JobPlan:
    return plan_from(options, workers, COMMAND, environment or {}, 8, lambda: gpus, HERE)


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
    assert not plan.is_local
    assert "GLOO_SOCKET_IFNAME" not in plan.environment
    plan = _plan(LaunchOptions(dist_url="tcp://10.0.0.1:23456", world_size=2, rank=0), gpus=4)
    assert plan.manual
    assert (plan.manual.address, plan.manual.port, plan.workers) == ("10.0.0.1", 23456, 4)


@pytest.mark.parametrize(
    ("options", "workers", "message"),
    [
        (LaunchOptions(hosts="a:2"), 3, "-np 3, but the hosts have 2 slots"),
        (LaunchOptions(hosts="a:0"), None, "-np 0: must be at least 1"),
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
