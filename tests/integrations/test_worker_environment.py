"""The variables of workers for the GPUs that Ray has given them."""

import pytest

pytest.importorskip("ray")
from horovod.ray.worker import VISIBLE, worker_variables


def test_workers_see_all_gpus_of_their_host() -> None:
    own = [["3"], ["1"], ["0"]]
    variables = worker_variables(["a", "a", "b"], own, "a", 1)
    assert [each[VISIBLE] for each in variables] == ["3,1", "3,1", "0"]


def test_without_gpus_nothing_is_hidden() -> None:
    assert VISIBLE not in worker_variables(["a"], [[]], "a", 1)[0]
