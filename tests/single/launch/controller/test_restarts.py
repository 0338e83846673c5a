"""Where a job that lost workers continues."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller.job_outcome import JobOutcome
from lockstep.launch.controller.restarts import first_hosts, loses_state
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import Transport, plan_job
from lockstep.launch.plan.options import LaunchOptions, RestartOptions


@pytest.mark.parametrize(
    ("staying", "must_lead", "is_lost"),
    [({"b": 1}, True, False), ({"b": 0}, True, False), ({"c": 1}, True, True), ({}, True, True), ({}, False, False)],
    ids=["a worker stays", "its commit remains", "only elsewhere", "nowhere", "all can restore it"],
)
def test_state_is_lost_if_the_first_host_does_not_have_it(
    staying: dict[str, int], must_lead: bool, is_lost: bool
) -> None:
    following = plan_job(["python"], [Host("b", 1), Host("c", 1)], Transport("manual"), 1, {}, frozenset({"b"}))
    assert loses_state(following, JobOutcome(1, staying=staying, must_lead=must_lead)) == is_lost


def test_hosts_of_a_script_are_not_combined_with_manual_nodes() -> None:
    where, script = LaunchOptions(nodes=2, node_rank=0, master_addr="a"), RestartOptions(host_discovery_script="true")
    with pytest.raises(ConfigError, match=r"^--host-discovery-script cannot be combined with --nodes"):
        first_hosts(where, script)
