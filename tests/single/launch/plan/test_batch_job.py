"""What a job asks of a batch system, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan.batch_script import BatchJob


@pytest.mark.parametrize(
    ("flags", "per_node"),
    [
        ({}, 1),
        ({"workers": 3}, 3),
        ({"nodes": 2, "workers": 8}, 4),
        ({"gpus_per_node": 4}, 4),
        ({"nodes": 2, "gpus_per_node": 4, "workers": 8}, 4),
    ],
)
def test_workers_on_each_node(flags: dict[str, Any], per_node: int) -> None:
    assert BatchJob(**flags).per_node == per_node


def test_the_warning_comes_before_the_end_of_a_short_job() -> None:
    assert (BatchJob(time="2-01:00:10").seconds, BatchJob(time="2-01:00:10").warning_seconds) == (176410, 120)
    assert BatchJob(time="00:08:00").warning_seconds == 120
    assert BatchJob(time="00:04:00").warning_seconds == 60
    assert BatchJob(time="00:00:01").warning_seconds == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(
            ({"time": time}, rf"--time '{time}': must be \[D-\]HH:MM:SS")
            for time in ("", "60", "10:00", "01:60:00", "1:00:61", "00:00:00", "0-00:00:00", "1 day")
        ),
        ({"nodes": 0}, "--nodes 0: must be at least 1"),
        ({"workers": 0}, "-np 0: must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1: must be at least 0"),
        ({"cpus_per_worker": 0}, "--cpus-per-worker 0: must be at least 1"),
        ({"name": "a b"}, "--name .*: must be one word"),
        ({"name": "a\n#SBATCH --x"}, "--name .*: must be one word"),
        ({"name": "a/b"}, "--name a/b: must be without /, as it also names the output file"),
        ({"name": ""}, "--name .*: must be one word"),
        ({"account": "$x"}, "--account .*: must be one word"),
        ({"queue": "-q"}, "--queue .*: must be one word"),
        ({"nodes": 2, "workers": 3}, "-np 3 cannot be divided equally among 2 nodes"),
        ({"gpus_per_node": 4, "workers": 2}, "2 workers and 4 GPUs per node"),
        ({"gpus_per_node": 1, "workers": 2}, "2 workers and 1 GPUs? per node"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchJob(**flags)
