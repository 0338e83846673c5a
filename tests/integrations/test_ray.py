"""horovod.ray on a real Ray, in namespaces that have the loopback interface alone and end with the program."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import alone
import pytest

alone.skip_without()
pytestmark = [pytest.mark.cold, pytest.mark.skipif(not find_spec("ray"), reason="needs ray")]
BEGIN = """
import os
import ray
from ray.cluster_utils import Cluster
from horovod.ray import RayExecutor

def where(*numbers, offset=0):
    import torch
    import horovod.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.ones(2) * (hvd.rank() + sum(numbers) + offset), op=hvd.Sum, name="total").tolist()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total

settings = RayExecutor.create_settings(timeout_s=120)
hasty = RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=1)
"""
INIT = "ray.init('local', num_cpus={cpus}, num_gpus={gpus}, include_dashboard=False, configure_logging=False)\n"


def told(script: str, folder: Path) -> dict[str, Any]:
    """Run a program, and return all that it tells."""
    with TemporaryDirectory(prefix="ray") as own:  # the names of Ray's sockets are too long for `folder`
        variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": own}
        return alone.told(BEGIN + script, folder, variables)


CALLS = """
class Model:
    def __init__(self, value, more=0):
        self.value = value + more

def report():
    import horovod.torch as hvd
    from horovod.ray import ray_logger
    for turn in range(3):
        ray_logger.log([hvd.rank(), turn])

executor = RayExecutor(settings, num_workers=2)
executor.start(Model, [5], {"more": 1}, {"MARK": "here"})
tell(places=executor.run(where, [1], {"offset": 2}))
tell(again=executor.run(where), remote=ray.get(executor.run_remote(where, [3])))
tell(executed=executor.execute(lambda model: model.value))
tell(single=executor.execute_single(lambda model: 2 * model.value))
tell(marks=executor.run(lambda: os.environ["MARK"]))
reports = []
executor.run(report, callbacks=[reports.append])
tell(reports=sorted(reports))
executor.shutdown()
"""
FAILURE = """
def fail():
    import torch
    import horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("no such thing")
    hvd.allreduce(torch.ones(1), name="waits")

executor = RayExecutor(settings, num_workers=2)
executor.start()
try:
    executor.run(fail)
except KeyError as error:
    tell(error=type(error).__name__, text=str(error))
try:
    executor.run(where)
except RuntimeError as error:
    tell(ended=str(error))
executor.start()
tell(restarted=executor.run(where))
executor.shutdown()
"""


TRAINER = """
os.environ["RAY_TRAIN_V2_ENABLED"] = "0"
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodConfig, HorovodTrainer

def loop(config):
    from ray import train
    rank, size, *place, total = where(config["more"])
    train.report({"rank": rank, "size": size, "place": place, "total": total})

trainer = HorovodTrainer(loop, train_loop_config={"more": 3}, scaling_config=ScalingConfig(num_workers=2),
                         horovod_config=HorovodConfig(), run_config=RunConfig(storage_path=os.path.abspath("results")))
metrics = trainer.fit().metrics
tell(trained={name: metrics[name] for name in ("rank", "size", "place", "total")})
"""
GPUS = """
@ray.remote(num_cpus=0)
def within():
    no_room = ""
    try:
        RayExecutor(hasty, num_workers=3, use_gpu=True, gpus_per_worker=2).start()
    except TimeoutError as error:
        no_room = str(error)
    patient = RayExecutor.create_settings(timeout_s=120)
    executor = RayExecutor(patient, num_workers=2, use_gpu=True, gpus_per_worker=2)
    executor.start()
    captures = executor.run(lambda: ray.get_runtime_context().should_capture_child_tasks_in_placement_group)
    seen = executor.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]), executor._own_group is None
    executor.shutdown()
    return *seen, captures, no_room

group = ray.util.placement_group([{"CPU": 1, "GPU": 2}] * 2)
Strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
strategy = Strategy(group, placement_group_capture_child_tasks=True)
tell(within=ray.get(within.options(scheduling_strategy=strategy).remote()))
"""


def test_functions_run_in_two_workers_that_meet_by_horovod(tmp_path: Path) -> None:
    told_of = told(INIT.format(cpus=2, gpus=0) + CALLS, tmp_path)
    for name, total in (("places", 7.0), ("again", 1.0), ("remote", 7.0)):
        assert told_of[name] == [[rank, 2, rank, 2, 0, 1, [total] * 2] for rank in range(2)]
    assert (told_of["executed"], told_of["single"], told_of["marks"]) == ([6, 6], 12, ["here"] * 2)
    assert told_of["reports"] == [[rank, turn] for rank in range(2) for turn in range(3)]


@pytest.mark.long
def test_a_failure_ends_the_workers_and_start_makes_others(tmp_path: Path) -> None:
    told_of = told(INIT.format(cpus=2, gpus=0) + FAILURE, tmp_path)
    assert told_of["restarted"] == [[rank, 2, rank, 2, 0, 1, [1.0] * 2] for rank in range(2)]
    assert "KeyError" in told_of["error"]
    assert "no such thing" in told_of["text"]
    assert told_of["ended"] == "this RayExecutor has no workers; call start() first"


HOSTS = """
from horovod.ray.ray_logger import Reports
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, configure_logging=False)
executor = RayExecutor(settings, num_hosts=2)
executor.start()
tell(places=executor.run(where), nodes=len(set(executor.run(lambda: ray.get_runtime_context().get_node_id()))))
executor.shutdown()
here = ray.get_runtime_context().get_node_id()
queues = [Reports([print]).queue for _ in range(4)]
nodes = [queue.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for queue in queues]
tell(queues=[node == here for node in ray.get(nodes)])
executor = RayExecutor(hasty, num_hosts=2, num_workers_per_host=2)
try:
    executor.start()
except TimeoutError as error:
    tell(no_room=str(error))
executor = RayExecutor(settings, num_workers=3)
executor.start()
tell(uneven=executor.run(where))
executor.shutdown()
"""


@pytest.mark.long
def test_workers_are_spread_over_nodes_and_too_many_are_refused(tmp_path: Path) -> None:
    told_of = told(HOSTS, tmp_path)
    assert told_of["places"] == [[rank, 2, 0, 1, rank, 2, [1.0] * 2] for rank in range(2)]
    assert told_of["nodes"] == 2
    assert told_of["queues"] == [True] * 4
    no_room = "resources for 4 workers within 1 s: they need 2 times {'CPU': 2} on different nodes"
    assert no_room in told_of["no_room"]
    places = sorted((local_rank, local_size) for _, _, local_rank, local_size, *_ in told_of["uneven"])
    assert places == [(0, 1), (0, 2), (1, 2)]
    assert [place[0] for place in told_of["uneven"]] == [0, 1, 2]


@pytest.mark.long
def test_workers_see_their_nodes_gpus_in_the_placement_group(tmp_path: Path) -> None:
    visible, inherited, captures, no_room = told(INIT.format(cpus=3, gpus=4) + GPUS, tmp_path)["within"]
    assert inherited
    assert captures == [False, False]
    assert no_room.startswith("3 workers of {'CPU': 1, 'GPU': 2} did not start within 1 s in the placement group")
    assert visible[0] == visible[1]
    assert sorted(visible[0].split(",")) == ["0", "1", "2", "3"]


@pytest.mark.long
def test_rays_own_trainer_for_horovod_trains_with_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    told_of = told(INIT.format(cpus=3, gpus=0) + TRAINER, tmp_path)  # the trainer takes a CPU itself
    assert told_of["trained"] == {"rank": 0, "size": 2, "place": [0, 2, 0, 1], "total": [7.0, 7.0]}


WRONG = [
    ({}, "either num_workers or num_hosts"),
    ({"num_workers": 2, "num_hosts": 1}, "either num_workers or num_hosts"),
    ({"num_workers": 0}, "at least one worker"),
    ({"num_hosts": 1, "num_workers_per_host": 0}, "at least one worker"),
    ({"num_workers": 1, "gpus_per_worker": 2}, "needs use_gpu=True"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_numbers_that_contradict_each_other_are_refused(arguments: dict[str, Any], message: str) -> None:
    from horovod.ray import RayExecutor

    with pytest.raises(ValueError, match=message):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_elastic_jobs_are_refused_with_alternatives() -> None:
    from horovod import ray

    calls = {
        "RayExecutor(min_workers=1)": lambda: ray.RayExecutor(ray.RayExecutor.create_settings(), min_workers=1),
        "RayExecutor(max_workers=3)": lambda: ray.RayExecutor(None, num_workers=2, max_workers=3),
        "ElasticRayExecutor": ray.ElasticRayExecutor.create_settings,
        "RayHostDiscovery": ray.elastic.RayHostDiscovery,
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: elastic jobs on Ray are not supported; use RayExecutor(settings,")
        assert "num_workers=...), or Ray Train" in str(caught.value)
