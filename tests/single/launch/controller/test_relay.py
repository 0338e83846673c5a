"""What a manually started node lets the first one decide: never which code runs on it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from node_jobs import JOB

from lockstep.config.run_paths import COMMAND
from lockstep.diagnosis import OBSERVE
from lockstep.files.staged import STAGED
from lockstep.launch.controller.relay import Relay
from lockstep.launch.node.job_folders import new_snapshots_path
from lockstep.launch.plan.job_plan import JobPlan, ManualNode, plan_local
from lockstep.launch.protocol.messages import Alive, End, NodeJob, pack, unpack
from lockstep.launch.staging.job_copies import copies_secret
from lockstep.launch.staging.stage_options import StageOptions
from lockstep.world import STARTED

PLAN = replace(plan_local(2, ["python", "mine.py"], 4, {}), bind="cores", interfaces=("eth1",))


def received(line: bytes, plan: JobPlan = PLAN) -> bytes:
    """What the node process receives of the launcher's line."""
    return Relay(plan, ManualNode(1, 2, "a", 29500), "127.0.0.1", "", "")._checked(line)


def job(plan: JobPlan = PLAN, **changes: object) -> NodeJob:
    message = unpack(received(pack(replace(JOB, **changes)), plan))  # type: ignore[arg-type]
    assert isinstance(message, NodeJob)
    return message


def test_node_runs_its_own_command_folder_and_devices() -> None:
    given = {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/tmp", STARTED: "1.5", OBSERVE: "1", COMMAND: "rm"}
    own = job(command=("rm", "-r", "/"), folder="/", bind="none", interfaces=("lo",), environment=given, stdout=0)
    assert own.command == ("python", "mine.py")
    assert (own.folder, own.bind, own.interfaces, own.stdout) == (os.getcwd(), "cores", ("eth1",), -1)
    assert own.environment[STARTED] == "1.5"
    assert own.environment[OBSERVE] == "1"
    assert own.environment[COMMAND] != "rm"
    assert not {"LD_PRELOAD", "PYTHONPATH"} & {*own.environment}
    assert own.slots == JOB.slots
    assert own.heartbeat


@pytest.mark.parametrize(
    "obeying", [replace(PLAN, command=()), replace(PLAN, staging=StageOptions("/data"))], ids=["study", "--stage"]
)
def test_node_obeys_the_first_one_only_if_its_user_asks_for_that(obeying: JobPlan) -> None:
    given = {"command": ("python", "theirs.py"), "environment": {STAGED: "{}"}, "folder": "/", "interfaces": ("lo",)}
    own = job(obeying, **given)
    assert (own.command, own.environment[STAGED]) == (("python", "theirs.py"), "{}")
    assert (own.folder, own.bind, own.interfaces) == (os.getcwd(), "cores", ("eth1",))
    assert job(**given).command == ("python", "mine.py")


def test_copies_have_a_secret_that_is_not_sent() -> None:
    relay = Relay(PLAN, ManualNode(1, 2, "a", 29500), "127.0.0.1", "", "own")
    request = json.loads(relay._for_stager(b'{"request": "prepare", "secret": "sent", "interfaces": ["lo"]}\n'))
    assert request == {"request": "prepare", "secret": copies_secret("own", "sent"), "interfaces": ["eth1"]}
    assert request["secret"] not in ("sent", copies_secret("", "sent"))
    assert json.loads(relay._for_stager(b'{"request": "find"}\n')) == {"request": "find"}


def test_only_flags_of_a_restarted_training_are_added() -> None:
    assert job(added=("--run-dir", "runs/a", "--batch-workers", "3")).command[2:] == (
        *("--run-dir", "runs/a"),
        *("--batch-workers", "3"),
    )
    for flag in ("--data", "-a", "--run-dir=x"):
        assert received(pack(replace(JOB, added=(flag, "os:system")))) == b""


def test_only_a_folder_for_snapshots_may_be_replaced() -> None:
    path = new_snapshots_path()
    assert job(snapshots=f"/elsewhere/{path.name}").snapshots == f"{path}-1"  # not that of a node on the same host
    for snapshots in ("/home", f"{path.parent}/..", f"/x/{path.name}/y", "."):
        assert received(pack(replace(JOB, snapshots=snapshots))) == b""


@pytest.mark.parametrize(
    "line", [b'{"is":  "nodejob", "command": ["rm"]}\n', b"nonsense\n", b"\xff\n", b'{"is": "end"}\n', b""]
)
def test_other_lines_are_dropped(line: bytes) -> None:
    assert received(line) == b""


def test_other_messages_arrive() -> None:
    for message in (Alive(), End(3.0)):
        assert unpack(received(pack(message))) == message
    assert job(snapshots="").snapshots == ""
