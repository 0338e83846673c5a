"""horovod.spark on a real Spark, in namespaces that have the loopback interface alone and end with the program."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import alone
import pytest

pytest.importorskip("pyspark")
alone.skip_without()
if shutil.which("java") is None:
    pytest.skip("Spark needs Java (Debian: default-jre-headless)", allow_module_level=True)
pytestmark = pytest.mark.cold

BEGIN = """
import io, os, sys
from pyspark import SparkConf, SparkContext
import horovod.spark
from horovod.runner.common.util.timeout import TimeoutException

def where(*numbers, offset=0):
    import torch
    import horovod.torch as hvd
    from horovod.spark.task import get_available_devices
    hvd.init()
    total = hvd.allreduce(torch.ones(2) * (hvd.rank() + sum(numbers) + offset), op=hvd.Sum, name="total").tolist()
    place = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    return hvd.rank(), hvd.size(), *place, total, get_available_devices()

try:
    horovod.spark.run(where)
except RuntimeError as error:
    tell(no_context=str(error))
configuration = SparkConf().set("spark.ui.enabled", "false").set("spark.local.dir", os.path.abspath("spark"))
"""
CONTEXT = """
context = SparkContext({master!r}, "test", conf=configuration)
context.setLogLevel("OFF")
"""
END = """
context.stop()
"""


def told(script: str, folder: Path, master: str = "local[2]") -> dict[str, Any]:
    """Run a program that uses Spark, and return all that it tells."""
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    return alone.told(BEGIN + CONTEXT.format(master=master) + script + END, folder, variables)


CALLS = """
def fail():
    import torch
    import horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("no such thing")
    hvd.allreduce(torch.ones(1), name="waits")

def speak():
    print("said in", os.environ["HOROVOD_RANK"], os.environ["MARK"])
    print("complained", file=sys.stderr)

tell(places=horovod.spark.run(where, [1], {"offset": 2}, num_proc=2))
out, err = io.StringIO(), io.StringIO()
horovod.spark.run(speak, num_proc=2, env={"MARK": "here"}, stdout=out, stderr=err)
tell(said=sorted(out.getvalue().splitlines()), complained=sorted(err.getvalue().splitlines()))
try:
    horovod.spark.run(fail, num_proc=2)
except RuntimeError as error:
    tell(failed=str(error))
try:
    horovod.spark.run(where, num_proc=3, start_timeout=1)
except TimeoutException as error:
    tell(no_room=str(error))
os.environ["HOROVOD_SPARK_START_TIMEOUT"] = "soon"
try:
    horovod.spark.run(where)
except ValueError as error:
    tell(no_number=str(error))
del os.environ["HOROVOD_SPARK_START_TIMEOUT"]
try:
    horovod.spark.run(where, num_proc=0)
except ValueError as error:
    tell(nobody=str(error))
tell(inferred=horovod.spark.run(where))
"""


def test_functions_run_in_tasks_of_a_barrier_stage(tmp_path: Path) -> None:
    told_of = told(CALLS, tmp_path)
    assert "Could not find an active SparkContext" in told_of["no_context"]
    for name, total in (("places", 7.0), ("inferred", 1.0)):
        assert told_of[name] == [[rank, 2, rank, 2, 0, 1, [total] * 2, []] for rank in range(2)]
    assert told_of["said"] == [f"[{rank}]<stdout>:said in {rank} here" for rank in range(2)]
    assert told_of["complained"] == [f"[{rank}]<stderr>:complained" for rank in range(2)]
    assert told_of["failed"].startswith("Horovod detected that one or more processes exited with non-zero status")
    assert "KeyError: 'no such thing'" in told_of["failed"]
    assert told_of["no_room"].startswith("Timed out waiting for Spark tasks to start. Please check that you have")
    assert told_of["no_number"] == "HOROVOD_SPARK_START_TIMEOUT=soon: must be a number of seconds"
    assert told_of["nobody"].startswith("num_proc=0: must be")


ELASTIC = """
def train(batches, end):
    import time

    import torch
    import horovod.torch as hvd
    hvd.init()
    begun = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]

    @hvd.elastic.run
    def loop(state):
        while state.batch < batches:
            hvd.allreduce(torch.ones(2), name="gradient")
            state.batch += 1
            if state.batch == 3 and hvd.rank() == 1 and not os.path.exists("ended"):
                open("ended", "w").close()
                if end == "worker":
                    os._exit(9)
                os.kill(os.getppid(), 9)
                time.sleep(100)  # until the end of the task ends it, too, instead of finishing with the other worker
            state.commit()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), state.batch

    return loop(hvd.elastic.TorchState(batch=0))
"""
REPLACED = """
def fail():
    import horovod.torch as hvd
    hvd.init()
    raise KeyError("no such thing", os.environ["HOROVOD_ELASTIC_TIMEOUT"])

tell(results=horovod.spark.run_elastic(train, [6, "worker"], num_proc=2, min_num_proc=1))
tell(more=horovod.spark.run_elastic(train, [3, "worker"], num_proc=2, max_num_proc=3))
try:
    horovod.spark.run_elastic(fail, num_proc=2, reset_limit=1, elastic_timeout=77)
except RuntimeError as error:
    tell(failed=str(error))
try:
    horovod.spark.run_elastic(fail, num_proc=2, min_num_proc=3)
except ValueError as error:
    tell(order=str(error))
try:
    horovod.spark.run_elastic(fail, num_proc=3, start_timeout=1)
except TimeoutException as error:
    tell(no_room=str(error))
tell(after=horovod.spark.run(where))
"""


def test_an_elastic_job_replaces_a_lost_worker_in_its_task(tmp_path: Path) -> None:
    told_of = told(ELASTIC + REPLACED, tmp_path)
    assert told_of["results"] == [[rank, 2, rank, 2, 6] for rank in range(2)]
    assert told_of["more"] == [[rank, 2, rank, 2, 3] for rank in range(2)]
    assert told_of["failed"].startswith("Horovod detected that one or more processes exited with non-zero status")
    assert "KeyError: ('no such thing', '77')" in told_of["failed"]
    assert told_of["order"].startswith("min_num_proc=3, num_proc=2, max_num_proc=2: must be")
    assert told_of["no_room"].startswith("Timed out waiting for Spark tasks to start.")
    assert [place[:6] for place in told_of["after"]] == [[rank, 2, rank, 2, 0, 1] for rank in range(2)]


LOST = """
tell(replaced=horovod.spark.run_elastic(train, [6, "task"], num_proc=2))
os.unlink("ended")
try:
    horovod.spark.run(train, [6, "task"], num_proc=2)
except RuntimeError as error:
    tell(failed=str(error))
tell(after=horovod.spark.run(where))
"""


def test_a_lost_task_is_replaced_in_an_elastic_job_alone(tmp_path: Path) -> None:
    told_of = told(ELASTIC + LOST, tmp_path, "local[2, 4]")
    assert told_of["replaced"] == [[rank, 2, rank, 2, 6] for rank in range(2)]
    assert told_of["failed"].startswith("Horovod detected that one or more processes exited with non-zero status")
    assert "worker 1 failed because its Spark task disconnected" in told_of["failed"]
    assert [place[:6] for place in told_of["after"]] == [[rank, 2, rank, 2, 0, 1] for rank in range(2)]
