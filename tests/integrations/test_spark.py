"""horovod.spark on a real Spark, in namespaces that have the loopback interface alone and end with the program."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from typing import Any

import alone
import pytest

alone.skip_without()
if not find_spec("pyspark") or shutil.which("java") is None:
    pytest.skip("needs pyspark and Java (Debian: default-jre-headless)", allow_module_level=True)

PROGRAM = """
import os, time
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
context = SparkContext("local[2, 4]", "test", conf=configuration)  # failures are allowed, as on clusters
context.setLogLevel("OFF")

def fail(how):
    import torch
    import horovod.torch as hvd
    hvd.init()
    if hvd.rank() == 1:
        if how == "raise":
            raise KeyError("no such thing")
        os.kill(os.getpid() if how == "kill worker" else os.getppid(), 9)
    if how != "raise":
        time.sleep(1000)
    hvd.allreduce(torch.ones(1), name="waits")

def mark():
    return os.environ.get("MARK")

def error(*args, **kwargs):
    try:
        horovod.spark.run(*args, **kwargs)
    except (RuntimeError, ValueError, TimeoutException) as error:
        return str(error)

tell(ranks=horovod.spark.run(where, [1], {"offset": 2}, num_proc=2))
tell(marks=horovod.spark.run(mark, num_proc=2, env={"MARK": "here"}))
tell(later=context.parallelize(range(2), 2).map(lambda _: (mark(), os.environ.get("RANK"))).collect())
tell(no_room=error(where, num_proc=3, start_timeout=1))
os.environ["HOROVOD_SPARK_START_TIMEOUT"] = "soon"
tell(not_a_number=error(where))
del os.environ["HOROVOD_SPARK_START_TIMEOUT"]
tell(no_worker=error(where, num_proc=0))
tell(raised=error(fail, ["raise"], num_proc=2))
tell(killed=error(fail, ["kill worker"], num_proc=2))
tell(lost=error(fail, ["kill task"], num_proc=2))
tell(inferred=horovod.spark.run(where))
context.stop()
"""


@pytest.fixture(scope="module")
def told_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    return alone.told(PROGRAM, tmp_path_factory.mktemp("spark"), variables)


@pytest.mark.cold
def test_spark_run_calls_function_in_barrier_tasks(told_of: dict[str, Any]) -> None:
    assert "Could not find an active SparkContext" in told_of["no_context"]
    for name, total in (("ranks", 7.0), ("inferred", 1.0)):
        assert told_of[name] == [[rank, 2, rank, 2, 0, 1, [total] * 2, []] for rank in range(2)]
    assert told_of["marks"] == ["here", "here"]
    assert told_of["later"] == [[None, None]] * 2
    assert told_of["no_room"].startswith("Timed out waiting for Spark tasks to start. Please check that you have")
    assert told_of["not_a_number"] == "HOROVOD_SPARK_START_TIMEOUT=soon: must be a number of seconds"
    assert told_of["no_worker"].startswith("num_proc=0: must be")


@pytest.mark.cold
def test_spark_run_raises_error_of_first_failed_worker(told_of: dict[str, Any]) -> None:
    """The stage must not be repeated, and the next call runs (`inferred`)."""
    for name in ("raised", "killed", "lost"):
        assert told_of[name].startswith("Horovod detected that one or more processes exited with non-zero status")
    assert "worker 1 failed:\nTraceback (most recent call last)" in told_of["raised"]
    assert told_of["raised"].endswith("KeyError: 'no such thing'")
    assert told_of["killed"].endswith("worker 1 was killed by signal 9")
    assert "Python worker exited unexpectedly" in told_of["lost"]


@pytest.mark.parametrize("name", ["stdout", "stderr", "executable"])
def test_spark_run_refuses_argument(name: str) -> None:
    from horovod import spark

    with pytest.raises(
        ValueError, match=f"{name} is not supported: the .* of Spark's executors|.*spark.pyspark.python"
    ):
        spark.run(print, **{name: "x"})


def test_spark_run_elastic_names_alternatives() -> None:
    from horovod import spark

    with pytest.raises(NotImplementedError, match=r"horovod\.spark\.run and .* `horovodrun --min-np` .*RayExecutor"):
        spark.run_elastic(print, num_proc=2, min_num_proc=1)
