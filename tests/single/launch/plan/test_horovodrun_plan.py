"""What horovodrun's flags mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.horovodrun_plan import FLAGS, RESTARTS, WORKERS, HorovodPlan, plan_horovod
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import JobPlan, plan_local
from lockstep.launch.plan.options import RestartOptions

COMMAND = ["python", "train.py", "-x"]
NAMES = {"localhost", "here"}


def _plan(**flags: Any) -> HorovodPlan:
    return plan_horovod(flags, COMMAND, 8, {}, NAMES)


def _local(**flags: Any) -> JobPlan:
    return _plan(num_proc=2, **flags).job


def _restarts(plan: HorovodPlan) -> RestartOptions:
    assert plan.restarts
    return plan.restarts


def test_plain_job_is_local_and_prints_lines_at_once() -> None:
    local = plan_local(2, COMMAND, 8, {})
    job = replace(local, environment={**local.environment, "PYTHONUNBUFFERED": "1", "LOCKSTEP_NODE": ""})
    plan = _plan(num_proc=2)
    assert (plan.job, plan.output, plan.warnings, plan.restarts) == (job, OutputPlan(2), (), None)


@pytest.mark.parametrize(
    ("flag", "value", "variable", "text"),
    [
        ("fusion_threshold_mb", 32, "HOROVOD_FUSION_THRESHOLD", "33554432"),
        ("fusion_threshold_mb", 0, "HOROVOD_FUSION_THRESHOLD", "0"),
        ("cycle_time_ms", 2.5, "HOROVOD_CYCLE_TIME", "2.5"),
        ("timeline_filename", "t.json", "HOROVOD_TIMELINE", "t.json"),
        ("timeline_mark_cycles", True, "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
        ("no_stall_check", True, "HOROVOD_STALL_CHECK_DISABLE", "1"),
        ("stall_check_warning_time_seconds", 5, "HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
        ("stall_check_shutdown_time_seconds", 9, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "9"),
        ("log_level", "DEBUG", "HOROVOD_LOG_LEVEL", "DEBUG"),
        ("log_without_timestamp", True, "HOROVOD_LOG_HIDE_TIME", "1"),
        ("start_timeout", 60, "HOROVOD_START_TIMEOUT", "60"),
        ("gloo_timeout_seconds", 60, "HOROVOD_GLOO_TIMEOUT_SECONDS", "60"),
        ("hierarchical_allreduce", False, "HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    ],
)
def test_a_flag_becomes_horovods_variable(flag: str, value: Any, variable: str, text: str) -> None:
    assert _local(**{flag: value}).environment[variable] == text
    assert variable not in _local().environment


def test_flag_without_effect_is_reported_once_with_the_reason() -> None:
    plan = _plan(num_proc=1, autotune=True, cache_capacity=1, reset_limit=2, torus_allreduce=False)
    assert [warning.partition(" ")[0] for warning in plan.warnings] == [
        "--autotune",
        "--cache-capacity",
        "--reset-limit",
    ]
    assert plan.warnings[0] == f"--autotune has no effect in Lockstep: {FLAGS['autotune'].reason}"


def test_output_goes_where_it_is_wanted() -> None:
    plan = _plan(num_proc=2, output_filename="logs", prefix_timestamp=True)
    assert plan.output == OutputPlan(2, timestamps=True, folder=Path("logs"))


def test_the_users_own_buffering_is_kept() -> None:
    plan = plan_horovod({"num_proc": 1}, COMMAND, 8, {"PYTHONUNBUFFERED": ""}, NAMES)
    assert isinstance(plan.job, JobPlan)
    assert "PYTHONUNBUFFERED" not in plan.job.environment


def test_other_hosts_are_reached_by_ssh() -> None:
    plan = _plan(num_proc=3, hosts="there:2,here:4", ssh_port=2222, network_interfaces=["ib0"], start_timeout=60)
    assert isinstance(plan.job, JobPlan)
    assert [(node.host, node.workers) for node in plan.job.nodes] == [("there", 2), ("here", 1)]
    assert "2222" in plan.job.nodes[0].start
    assert (plan.job.interfaces, plan.job.start_timeout) == (("ib0",), 60)
    assert plan.warnings == ()
    (warning,) = _plan(num_proc=1, ssh_port=2222).warnings
    assert warning.startswith("--ssh-port has no effect")


@pytest.mark.parametrize("where", [{}, {"hosts": "there:2"}, {"min_np": 1}, {"min_np": 1, "hosts": "there:2"}])
def test_a_site_profile_is_for_every_kind_of_job(where: dict[str, Any]) -> None:
    plan = _plan(num_proc=2, site="frontier", **where)
    assert plan.job.environment["MIOPEN_USER_DB_PATH"] == "/tmp/my-miopen-cache"
    assert "site frontier: " in plan.job.notes[-1]
    assert plan.where.site == "frontier", "of later generations"
    with pytest.raises(ConfigError, match="unknown site"):
        _plan(num_proc=2, site="nowhere", **where)


def test_an_elastic_job_has_bounds() -> None:
    plan = _plan(min_np=1)
    assert (plan.job.workers, _restarts(plan).min_np, _restarts(plan).max_np) == (1, 1, 1)
    plan = _plan(num_proc=2, min_np=1, max_np=4, hosts="here:8", reset_limit=3)
    assert (plan.job.workers, _restarts(plan).min_np, _restarts(plan).max_np) == (4, 1, 4)
    assert (_restarts(plan).max_restarts, _restarts(plan).elastic_timeout) == (3, 600)
    plan = _plan(num_proc=2, host_discovery_script="./discover.sh", slots_per_host=2, elastic_timeout=9)
    assert (plan.job.workers, _restarts(plan).min_np, _restarts(plan).max_np) == (2, 2, WORKERS)
    assert _restarts(plan).host_discovery_script == "./discover.sh"
    assert (plan.slots_per_host, _restarts(plan).elastic_timeout) == (2, 9)


def test_elastic_job_may_have_other_hosts() -> None:
    plan = _plan(min_np=1, hosts="there:2,here:2", ssh_port=2222, blacklist_cooldown_range=[1.0, 5.0])
    assert [(node.host, node.workers) for node in plan.job.nodes] == [("there", 2), ("here", 2)]
    assert (_restarts(plan).max_restarts, _restarts(plan).min_np, _restarts(plan).max_np) == (RESTARTS, 1, 4)
    for name in ("PYTHONUNBUFFERED", "HOROVOD_ELASTIC"):
        assert plan.variables[name] == plan.job.environment[name] == "1"
    assert [warning.partition(" has")[0] for warning in plan.warnings] == ["--blacklist-cooldown-range"]
    few = _plan(num_proc=2, max_np=3, hosts="there:2,here:2", reset_limit=5, elastic_timeout=9)
    assert [node.workers for node in few.job.nodes] == [2, 1]
    assert (_restarts(few).max_restarts, _restarts(few).min_np, _restarts(few).max_np) == (5, 2, 3)
    assert _restarts(few).elastic_timeout == 9


@pytest.mark.parametrize("name", ["there", "here"])
def test_a_discovery_scripts_first_hosts_are_the_first_workers(name: str) -> None:
    flags = {"min_np": 2, "host_discovery_script": "./discover.sh", "slots_per_host": 2}
    plan = plan_horovod(flags, COMMAND, 8, {}, NAMES, [Host(name, 2)])
    assert [(node.host, node.workers) for node in plan.job.nodes] == [(name, 2)]
    assert (plan.job.workers, _restarts(plan).max_np, plan.slots_per_host) == (2, WORKERS, 2)
    assert _restarts(plan).host_discovery_script == "./discover.sh"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "missing -np, the number of workers"),
        ({"num_proc": 0}, "-np 0: must be at least 1"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "-np 3, but the hosts have 2 slots"),
        ({"num_proc": 3, "min_np": 2, "hosts": "there:2"}, "-np 3, but the hosts have 2 slots"),
        ({"min_np": 2, "hosts": "there:2", "reset_limit": -1}, "--reset-limit -1: must be at least 0"),
        ({"num_proc": 2, "hosts": "localhost:2", "hostfile": "f"}, "--hosts and --hostfile both"),
        ({"num_proc": 2, "hostfile": "/no/such"}, "--hostfile /no/such: No such file"),
        ({"num_proc": 2, "controller": "mpi"}, "--mpi: .*mpirun -np N python"),
        ({"num_proc": 2, "controller": "jsrun"}, "--jsrun: "),
        ({"max_np": 2}, "missing --min-np"),
        ({"num_proc": 1, "min_np": 2}, "must be at least 1 and in ascending order"),
        ({"min_np": 2, "max_np": 1}, "must be at least 1 and in ascending order"),
        ({"num_proc": 3, "min_np": 1, "hosts": "localhost:2"}, "-np 3, but the hosts have 2 slots"),
    ],
)
def test_a_job_that_cannot_be_is_refused_by_the_flags_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(**flags)


def test_environments_elastic_timeout_applies_to_the_launcher() -> None:
    environment = {"HOROVOD_ELASTIC_TIMEOUT": "7"}
    for flags, seconds in (({}, 7), ({"elastic_timeout": 9}, 9)):
        plan = plan_horovod({"min_np": 1, **flags}, COMMAND, 8, environment, NAMES)
        assert _restarts(plan).elastic_timeout == seconds


def test_environments_start_timeout_applies_to_the_launcher() -> None:
    for flags, environment, seconds in (
        ({}, {}, JobPlan.start_timeout),
        ({}, {"HOROVOD_START_TIMEOUT": "300"}, 300),
        ({"start_timeout": 60}, {"HOROVOD_START_TIMEOUT": "300"}, 60),
    ):
        for workers in ("num_proc", "min_np"):
            plan = plan_horovod({workers: 1, **flags}, COMMAND, 8, environment, NAMES)
            assert plan.job.start_timeout == seconds
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT=soon: must be a positive number of seconds"):
        plan_horovod({"num_proc": 1}, COMMAND, 8, {"HOROVOD_START_TIMEOUT": "soon"}, NAMES)
