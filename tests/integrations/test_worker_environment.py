"""The variables of workers for the GPUs that Ray has given them."""

from horovod.runner import worker_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"


def test_workers_see_all_gpus_of_their_host() -> None:
    own = [["3"], ["1"], ["0"]]
    told = worker_environment.worker_variables(["a", "a", "b"], own, "a", 1)
    assert [variables[VISIBLE] for variables in told] == ["3,1", "3,1", "0"]


def test_without_gpus_nothing_is_hidden() -> None:
    assert VISIBLE not in worker_environment.worker_variables(["a"], [[]], "a", 1)[0]
    assert worker_environment.gpu_variables([], 0, 2) == {}
    assert worker_environment.gpu_variables(["MIG-7"], 0, 2) == {}


def test_a_workers_own_gpu_is_in_its_local_ranks_place() -> None:
    assert worker_environment.gpu_variables(["1"], 0, 2) == {VISIBLE: "1,0"}
    assert worker_environment.gpu_variables(["1"], 1, 2) == {VISIBLE: "0,1"}
    assert worker_environment.gpu_variables(["2", "3"], 0, 2) == {VISIBLE: "2,3,0,1"}
