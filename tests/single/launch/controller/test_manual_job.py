"""A job whose nodes are started manually, before they meet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller.manual_job import run_manual_job, run_study
from lockstep.launch.plan.job_plan import ManualNode, plan_local
from lockstep.launch.plan.options import LaunchOptions
from lockstep.launch.plan.worker_variables import SECRET
from lockstep.launch.staging.stage_options import StageOptions

PLAN = replace(plan_local(1, ["python"], 1, {}), manual=ManualNode(1, 2, "127.0.0.1", 29500))


@pytest.mark.parametrize(
    ("changes", "what"), [({"staging": StageOptions("/data")}, "--stage"), ({"command": ()}, "a study")]
)
def test_no_node_obeys_another_without_a_secret(
    changes: dict[str, object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    message = f"^{what} with --nodes: all nodes run the first one's command; set {SECRET} to the same text on all nodes"
    with pytest.raises(ConfigError, match=message):
        run_manual_job(replace(PLAN, **changes), LaunchOptions(), lambda joined: 0)  # type: ignore[arg-type]


def test_study_on_other_hosts_is_run_here() -> None:
    where = LaunchOptions(hosts="a:1")
    assert run_study(where, 2, lambda given: 5 if given == where else 1) == 5
