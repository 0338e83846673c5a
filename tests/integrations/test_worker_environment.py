"""The variables of workers for the nodes and GPUs that Ray has given them."""

import pytest

pytest.importorskip("ray")
from horovod.ray.runner import Coordinator
from horovod.ray.worker import VISIBLE, worker_variables


def test_workers_see_all_gpus_of_their_host() -> None:
    own = [["3"], ["1"], ["0"]]
    variables = worker_variables(["a", "a", "b"], own, "a", 1)
    assert [each[VISIBLE] for each in variables] == ["3,1", "3,1", "0"]


def test_without_gpus_nothing_is_hidden() -> None:
    assert VISIBLE not in worker_variables(["a"], [[]], "a", 1)[0]


def test_coordinator_counts_workers_by_node() -> None:
    coordinator = Coordinator(None)
    for rank, host in enumerate("aaab"):
        coordinator.register(host, f"node {host}", rank)
    names = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    found = coordinator.finalize_registration()
    ranks = {rank: "".join(values[f"HOROVOD_{name}"] for name in names) for rank, values in found.items()}
    assert ranks == {0: "0203", 1: "0213", 2: "0223", 3: "1201"}
    assert (coordinator.world_size, coordinator.hostnames) == (4, {"a", "b"})
