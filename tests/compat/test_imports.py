"""What scripts import from `horovod`: every path, every name, every signature, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run

import lockstep.hvd

ROOT = Path(__file__).parents[2]

# The modules that scripts import by path, and what they take from them.
MODULES = {
    "horovod": "run __version__",
    "horovod.runner": "run",
    "horovod.runner.launch": "run_commandline",
    "horovod.runner.common.util.secret": "SECRET_LENGTH make_secret_key compute_digest check_digest",
    "horovod.runner.common.util.timeout": "Timeout TimeoutException",
    "horovod.runner.elastic.worker": "HostUpdateResult",
    "horovod.torch": """
        init shutdown is_initialized size rank local_size local_rank cross_size cross_rank mpi_enabled mpi_built
        gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built mpi_threads_supported
        start_timeline stop_timeline Average Sum Adasum Min Max Product
        allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
        grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
        grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
        reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll
        synchronize ProcessSet global_process_set add_process_set remove_process_set HorovodInternalError
        broadcast_parameters
        broadcast_optimizer_state broadcast_object allgather_object Compression DistributedOptimizer SyncBatchNorm
        elastic""",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": """
        broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object""",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run run_fn init shutdown TorchState ElasticSampler state sampler",
    "horovod.torch.elastic.state": """
        TorchState StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler get_handler_registry
        set_handler_registry""",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": """
        State ObjectState run_fn HostUpdateResult HorovodInternalError HostsUpdatedInterrupt""",
    "horovod.common.exceptions": """
        HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError get_version_mismatch_message""",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.util": """
        nccl_built gloo_built mpi_built ddl_built ccl_built cuda_built rocm_built check_installed_version
        extension_available get_average_backwards_compatibility_fun get_ext_suffix gpu_available is_iterable
        is_version_greater_equal_than num_rank_is_power_2 HorovodVersionMismatchError get_version_mismatch_message""",
}
# Those that the package alone has: of Horovod's own inner workings, or for other frameworks.
OF_THE_PACKAGE = {
    "horovod.torch.mpi_ops": """
        HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast
        HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter handle_average_backwards_compatibility
        check_installed_version get_average_backwards_compatibility_fun gpu_available num_rank_is_power_2
        is_homogeneous""",
    "horovod.torch.optimizer": "_DistributedOptimizer _DistributedAdasumOptimizer",
}
OF_BOTH = MODULES["horovod.torch"].partition("broadcast_parameters")[0]
MODULES["horovod.torch.mpi_ops"] = f"{OF_BOTH} Compression {OF_THE_PACKAGE['horovod.torch.mpi_ops']}"

REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=gps"
REDUCE_COMPRESSED = (
    "average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=gps"
)
SCATTER = "name=None, op=Average, process_set=gps, prescale_factor=1.0, postscale_factor=1.0"
SCATTER_COMPRESSED = (
    "name=None, compression=none, op=Average, process_set=gps, prescale_factor=1.0, postscale_factor=1.0"
)

# Arguments and defaults of horovod.torch's functions: gps is global_process_set, none Compression.none, "..." stands
# for the further arguments, with defaults, of torch's own class.
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "allreduce": f"tensor, {REDUCE_COMPRESSED}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {REDUCE_COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=gps",
    "allgather": "tensor, name=None, process_set=gps",
    "allgather_async": "tensor, name=None, process_set=gps",
    "grouped_allgather": "tensors, name=None, process_set=gps",
    "grouped_allgather_async": "tensors, name=None, process_set=gps",
    "broadcast": "tensor, root_rank, name=None, process_set=gps",
    "broadcast_async": "tensor, root_rank, name=None, process_set=gps",
    "broadcast_": "tensor, root_rank, name=None, process_set=gps",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=gps",
    "alltoall": "tensor, splits=None, name=None, process_set=gps",
    "alltoall_async": "tensor, splits=None, name=None, process_set=gps",
    "reducescatter": f"tensor, {SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "join": "device=-1",
    "barrier": "process_set=gps",
    "poll": "handle",
    "synchronize": "handle",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=gps",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=gps"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, ...",
    "elastic.run": "func",
    "elastic.run_fn": "func, reset",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.TorchState.register_reset_callbacks": "self, callbacks",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.ElasticSampler.set_epoch": "self, epoch",
    "elastic.ElasticSampler.record_batch": "self, batch_idx, batch_size",
    "elastic.ElasticSampler.load_state_dict": "self, state_dict",
    "elastic.state.set_handler_registry": "registry",
}
NO_ARGUMENTS = (
    "shutdown is_initialized size rank local_size local_rank cross_size cross_rank mpi_enabled mpi_built gloo_enabled "
    "gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built mpi_threads_supported stop_timeline"
)
SIGNATURES |= dict.fromkeys(NO_ARGUMENTS.split(), "")

RUN = (
    "func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, "
    "cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None, "
    "ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, "
    "mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None"
)


def written(function: Any) -> str:
    """A signature as the tables write it."""
    hvd = importlib.import_module("horovod.torch")
    names = {id(hvd.global_process_set): "gps", id(hvd.Compression.none): "none"}
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        if parameter.default is parameter.empty:
            parts.append(f"{star}{parameter.name}")
        else:
            parts.append(f"{parameter.name}={names.get(id(parameter.default), repr(parameter.default))}")
    return ", ".join(parts)


def found(module: str, path: str) -> Any:
    """What stands at a dotted path in a module."""
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("module", "names"), MODULES.items(), ids=MODULES)
def test_every_name_is_there(module: str, names: str) -> None:
    missing = [name for name in names.split() if not hasattr(importlib.import_module(module), name)]
    assert not missing


# Horovod imports the launcher's modules where somebody asks for them.
LATE = (
    "horovod.runner.launch",
    "horovod.runner.common.util.secret",
    "horovod.runner.common.util.timeout",
    "horovod.runner.elastic.discovery",
    "horovod.runner.elastic.worker",
)
REACH = """
import functools, sys, {first}
for path in {paths!r}:
    module = functools.reduce(getattr, path.split(".")[1:], horovod)
    assert module is sys.modules[path], path
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("first", "paths"),
    [
        ("horovod.torch", [path for path in MODULES if path not in LATE]),
        ("horovod", [path for path in MODULES if not path.startswith("horovod.torch") and path not in LATE]),
    ],
)
def test_submodules_are_attributes_after_one_import(first: str, paths: list[str], tmp_path: Path) -> None:
    done = run([sys.executable, "-c", REACH.format(first=first, paths=paths)], tmp_path, cold=True)
    assert done.returncode == 0, done.stderr


def test_a_star_import_takes_every_name_and_the_submodules() -> None:
    names: dict[str, Any] = {}
    exec("from horovod.torch import *", names)
    submodules = [path.split(".")[2] for path in MODULES if path.startswith("horovod.torch.")]
    assert not {*MODULES["horovod.torch"].split(), *submodules} - names.keys()


# Whose names horovod.torch and its modules have, where it is no module of lockstep.hvd with that name.
OWN = {
    "horovod.torch": "lockstep.hvd",
    "mpi_ops": "lockstep.hvd",
    "functions": "lockstep.hvd.ops.functions",
    "optimizer": "lockstep.hvd.optimizer.distributed",
}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("horovod.torch")])
def test_names_are_those_of_lockstep_itself(module: str) -> None:
    part = module.removeprefix("horovod.torch.")
    own = importlib.import_module(OWN.get(part, f"lockstep.hvd.{part}"))
    others = OF_THE_PACKAGE.get(module, "").split()
    for name in set(MODULES[module].split()) - {"elastic", "state", "sampler", *others}:
        assert found(module, name) is getattr(own, name), name


@pytest.mark.parametrize(("path", "signature"), SIGNATURES.items(), ids=SIGNATURES)
def test_signatures_are_horovods(path: str, signature: str) -> None:
    average = importlib.import_module("horovod.torch").Average
    expected, *more = signature.replace("op=Average", f"op={average!r}").split("...")
    actual = written(found("horovod.torch", path))
    assert actual.startswith(expected) if more else actual == expected


def test_what_starts_a_function_has_horovods_signature() -> None:
    run = importlib.import_module("horovod.runner").run
    assert written(run) == RUN


def test_the_reductions_are_numbered_as_horovods() -> None:
    hvd = importlib.import_module("horovod.torch")
    constants = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert constants == list(range(6))
    assert {type(constant) for constant in constants} == {int}


@pytest.mark.parametrize(
    "code",
    [
        "import horovod, horovod.runner; assert horovod.run is horovod.runner.run is function",
        "from horovod.run import run; assert run is function",
        "import horovod.run; from horovod import run; assert run.run is function; call(run)",
    ],
)
def test_run_is_a_function_and_a_module(code: str, tmp_path: Path) -> None:
    prelude = """
from lockstep.launch.controller.run_function import run as function
def call(run):
    try:
        run(print, hosts="a:1", hostfile="b")
    except ValueError:
        return
    raise AssertionError("it has not been called")
"""
    done = run([sys.executable, "-c", prelude + code], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.cold
def test_training_imports_no_more_than_lockstep_does(tmp_path: Path) -> None:
    code = (
        "import sys, lockstep.hvd.elastic; from lockstep.hvd import *; ours = {*sys.modules}\n"
        "import horovod.torch; print('more:', *(sys.modules.keys() - ours))"
    )
    done = run([sys.executable, "-c", code], tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    more, *names = done.stdout.split()
    assert more == "more:"
    assert not [name for name in names if name.startswith(("lockstep", "torch"))]


REFUSED = {
    **dict.fromkeys(["tensorflow", "keras", "mxnet", "data", "spark.torch", "spark.task"], r"horovod\.torch"),
    "runner.elastic.discovery": "horovodrun --min-np",
}


@pytest.mark.parametrize("name", REFUSED)
def test_missing_modules_are_refused_with_alternatives(name: str) -> None:
    assert "." in name or importlib.util.find_spec(f"horovod.{name}")  # some libraries check this first
    with pytest.raises(ImportError, match=REFUSED[name]) as caught:
        importlib.import_module(f"horovod.{name}")
    assert not isinstance(caught.value, ModuleNotFoundError)


@pytest.mark.parametrize("name", ["run", "run_elastic"])
def test_spark_run_names_torch_distributors_line(name: str) -> None:
    def train(steps: int) -> None: ...

    with pytest.raises(NotImplementedError) as caught:
        getattr(importlib.import_module("horovod.spark"), name)(train, (3,), num_proc=2)
    line = "TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, *args, **kwargs)"
    assert str(caught.value).endswith(f": from pyspark.ml.torch.distributor import TorchDistributor; {line}")


@pytest.mark.cold
def test_missing_ray_error_names_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; import horovod.torch, horovod.ray"
    done = run([sys.executable, "-c", code], tmp_path, cold=True)
    assert done.stderr.splitlines()[-1] == "ImportError: horovod.ray needs Ray: pip install 'lockstep-horovod[ray]'"


@pytest.mark.cold
def test_beside_horovod_itself_the_import_is_refused(tmp_path: Path) -> None:
    information = tmp_path / "horovod-0.28.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import horovod"
    outcome = run([sys.executable, "-c", code], tmp_path, cold=True)
    assert outcome.returncode == 1
    assert "ImportError" in outcome.stderr
    assert "pip uninstall horovod" in outcome.stderr


def test_the_helpers_that_check_versions_and_arguments() -> None:
    util = importlib.import_module("horovod.common.util")
    assert [util.is_iterable(each) for each in ([], "a", iter(()), 5, None)] == [True, True, True, False, False]
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert not util.is_version_greater_equal_than("2.9.0+cpu", "2.9.1")
    for wrong in (("2.0.0", "2.0"), (2, "2.0.0")):
        with pytest.raises(ValueError, match=r"major\.minor\.patch|strings"):
            util.is_version_greater_equal_than(*wrong)
    assert importlib.machinery.EXTENSION_SUFFIXES[0] == util.get_ext_suffix()
    assert [number for number in range(10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")
    util.check_installed_version("torch", "0.0.0")
    operation = util.get_average_backwards_compatibility_fun(None)
    assert [operation(op, None) for op in (None, 4)] == [0, 4]
    with pytest.warns(DeprecationWarning, match="average"):
        assert operation(None, False) == 1
    with pytest.raises(ValueError, match="supersedes"), pytest.warns(DeprecationWarning, match="average"):
        operation(4, True)


def test_the_process_model_as_an_object() -> None:
    basics = importlib.import_module("horovod.common.basics").HorovodBasics(__file__, "mpi_lib_v2")
    assert (basics.Average, basics.Product) == (0, 5)
    assert basics.gloo_built()
    assert not basics.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        basics.size()
    with pytest.raises(AttributeError, match="no attribute 'allreduces'"):
        _ = basics.allreduces


def test_the_classes_of_the_optimizers_are_for_annotations() -> None:
    hvd, torch = importlib.import_module("horovod.torch"), importlib.import_module("torch")
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    for kind in (hvd.optimizer._DistributedOptimizer, hvd.optimizer._DistributedAdasumOptimizer):
        assert issubclass(kind, torch.optim.Optimizer)
        assert not isinstance(optimizer, kind)  # nor with Horovod
    hvd.shutdown()


def test_the_functions_with_gradients_are_classes_too() -> None:
    hvd, ops = importlib.import_module("horovod.torch"), importlib.import_module("horovod.torch.mpi_ops")
    torch, everyone = importlib.import_module("torch"), hvd.global_process_set
    hvd.init()
    x, factors = torch.arange(4.0, requires_grad=True), (0.5, 2.0)
    for result in (
        ops.HorovodAllreduce.apply(x, None, "a", hvd.Sum, *factors, everyone),
        *ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Sum, *factors, everyone, x, x),
        ops.HorovodAllgather.apply(x, "c", everyone),
        *ops.HorovodGroupedAllgather.apply("d", everyone, x, x),
        ops.HorovodBroadcast.apply(x, 0, "e", everyone),
        ops.HorovodAlltoall.apply(x, None, "f", everyone),
        ops.HorovodReducescatter.apply(x, "g", hvd.Sum, everyone, *factors),
        *ops.HorovodGroupedReducescatter.apply("h", hvd.Sum, everyone, *factors, x, x),
    ):
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert gradient.tolist() == [0.0, 2.0, 4.0, 6.0]
    hvd.shutdown()


def test_a_job_is_started_by_the_runners_command_line(tmp_path: Path) -> None:
    code = "import sys; from horovod.runner.launch import run_commandline; sys.argv[1:] = {words}; run_commandline()"
    for words, expected in ((["-np", "2", "echo", "here"], 0), (["-np", "1", "false"], 1)):
        done = run([sys.executable, "-c", code.format(words=words)], tmp_path)
        assert done.returncode == expected, done.stderr
        assert done.stdout.count("<stdout>:here") == (2 if expected == 0 else 0)


def test_lockstep_identifies_itself() -> None:
    horovod = importlib.import_module("horovod")
    assert horovod.__version__ == "0.28.1"
    assert horovod.lockstep_version == importlib.metadata.version("lockstep-torch")
    assert lockstep.hvd.__doc__
