"""Why a host cannot take its part: one line that names the host and the fix."""

from __future__ import annotations

import re

import pytest

from lockstep.launch.controller.start_errors import disagreement, too_late, why_not_started
from lockstep.launch.plan.job_plan import NodePlan, Transport, start_command

NODE = NodePlan("b", 2, start_command(Transport("ssh", "/opt/py/bin/python"), "b", is_here=False), is_here=False)


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (255, "root@b: Permission denied (publickey).\r\n", "b refuses this user's key; copy it with `ssh-copy-id b`"),
        (255, "Host key verification failed.\r\n", "b has an unknown or changed host key"),
        (255, "ssh: Could not resolve hostname b: Name or service not known", "b is an unknown host name"),
        (255, "ssh: connect to host b port 22: Connection refused", "b has no SSH server at that port"),
        (255, "ssh: connect to host b port 22: No route to host", "b is unreachable"),
        (255, "something new", "b cannot be reached by SSH: something new"),
        (127, "sh: 1: exec: /opt/py/bin/python: not found", "b has no /opt/py/bin/python: install it there"),
        (1, "/opt/py/bin/python: No module named lockstep", "b lacks the package lockstep in /opt/py/bin/python"),
        (
            1,
            "Error while finding module specification for 'lockstep.launch.node' "
            "(ModuleNotFoundError: No module named 'lockstep')",
            "b lacks the package lockstep in /opt/py/bin/python",
        ),
        (
            2,
            "Unknown option: -P\nusage: python [option] ...",
            "b has a /opt/py/bin/python older than 3.11",
        ),
        (9, "", "b failed to start: exit code 9"),
        (-9, "", "the node process on b was killed by SIGKILL (possibly out of memory) during the"),
        (128 + 15, "", "the node process on b was killed by SIGTERM during the start"),
        (255, "", "the SSH connection to b closed without an error: the node process there was killed"),
    ],
)
def test_start_error_is_reported_with_its_fix(code: int, said: str, told: str) -> None:
    line = why_not_started(NODE, code, said)
    assert line.startswith(told)
    assert "\n" not in line


def test_late_node_is_reported_with_likely_causes_and_load() -> None:
    here = NodePlan("here", 1, ("python",))
    assert too_late([NODE, NODE], "answer", 120.0) == (
        "b, b did not answer within 120 s: the machine is overloaded, or the network or the file system is slow; "
        "to wait longer, use --start-timeout S"
    )
    assert re.fullmatch(
        r"here did not import torch within 600 s: the machine is overloaded \(load [\d.]+ on \d+ cores\), or the file "
        r"system is slow; to wait longer, use --start-timeout S",
        too_late([here], "import torch", 600.0),
    )


def test_other_versions_are_named_with_both_hosts() -> None:
    own = {"Lockstep": "1", "torch": "2.15", "Python": "3.11"}
    assert disagreement(["a", "b"], [own, own]) == ""
    line = disagreement(["a", "b", "c"], [own, own, {**own, "torch": "2.14"}])
    assert line.startswith("c has torch 2.14, but a has 2.15: install the same")
