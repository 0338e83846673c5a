"""Apply environment variables that a script sets before it imports a torch that was preloaded.

A fresh interpreter reads them during the import. Of these, thread counts and torch's debug settings can still be
applied; for the others, a line on stderr reports that they have no effect. Most variables, such as CUDA_VISIBLE_DEVICES
and NCCL's, are read later and need nothing. The lists come from recording the reads of os.environ during the import of
torch 2.15, torchvision, torch._dynamo and torch._inductor.compile_fx, from grepping torch's sources, and, for its C++
libraries, from setting variables after the import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress

from lockstep.world.devices import usable_cores

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the first one set is in effect, as in torch
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # as in OpenBLAS
DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"
LOGS = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT", "TORCH_TRACE", "TORCH_DTRACE")

# Beginnings of names, by the library that reads them.
READ_AT_IMPORT = (
    *("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_"),
    *("MPMATH_", "NETWORKX_", "NPY_", "NUMPY_", "PILLOW_", "SYMPY_"),
    *("CUTLASS_", "KINETO_USE_DAEMON", "TRITON_USE_META_WS"),
    *("PYTORCH_JIT", "PYTORCH_MATCHER_LOGLEVEL"),
    *("PYTORCH_REORDER_COLLECTIVES_LIMIT", "PYTORCH_SINK_WAITS_LIMIT"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_", "TORCH_CUDAGRAPH_GC"),
    *("TORCH_CPP_LOG_LEVEL", "TORCH_CUDA_SANITIZER", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_DISABLE_NATIVE_", "TORCH_FAKE_TENSOR_", "TORCH_USE_RTLD_GLOBAL"),
    *("TORCH_CACHING_PRECOMPILE", "TORCH_COMPILE", "TORCH_STRICT_PRECOMPILE", "TORCHEXPORT_"),
    *("TORCH_DYNAMO_", "TORCHDYNAMO_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "INDUCTOR_", "TORCHINDUCTOR_"),
)
READ_LATER = (
    *("KMP_DUPLICATE_LIB_OK", "MKL_VERBOSE"),  # threadpoolctl sets the first one, too
    *("TORCH_COMPILE_BACKEND", "TORCHDYNAMO_DEBUG_FUNCTION", "TORCHDYNAMO_DISABLE"),
    *("TORCHDYNAMO_EXTENDED_ADVICE", "TORCHDYNAMO_PRINT_MISSING"),
    *("AOT_INDUCTOR_CUSTOM_", "INDUCTOR_WRITE_SCHEDULER_GRAPH", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_REDIS_"),
    *("TORCHINDUCTOR_CONV_LOGGING_FILE", "TORCHINDUCTOR_MM_LOGGING_FILE"),
    *("TORCHINDUCTOR_DUMP_LAUNCH_", "TORCHINDUCTOR_PATTERN_MATCH_DEBUG"),
)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # only "backend" at import


def apply_to_numpy(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Set the threads of numpy's BLAS if the environment's thread count has changed since the process started."""
    if any(_differs(name, before, now) for name in BLAS_THREADS):
        with suppress(ImportError):
            from threadpoolctl import ThreadpoolController

            ThreadpoolController().select(internal_api="openblas").limit(limits=_threads(BLAS_THREADS, now))


def apply_to_torch(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Apply to torch the settings that have changed since the process started; report those without effect."""
    import torch

    if any(_differs(name, before, now) for name in THREADS):
        torch.set_num_threads(_threads(THREADS, now))
    if _differs(DEBUG_LEVEL, before, now) and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()
    applied = {*THREADS, *BLAS_THREADS, DEBUG_LEVEL}
    logs = getattr(sys.modules.get("torch._logging._internal"), "_init_logs", None)
    if logs is not None:
        applied.update(LOGS)
        if any(_differs(name, before, now) for name in LOGS):
            logs()
    for name in without_effect(before, now):
        if name not in applied:
            print(
                f"lockstep: {name} was set after torch was loaded and has no effect; "
                "set it before the launcher starts, or use --no-preload",
                file=sys.stderr,
            )


def without_effect(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changed variables that an import of torch reads, sorted."""
    changed = sorted(name for name in {*before, *now} if _differs(name, before, now))
    return [name for name in changed if _is_read_at_import(name, now.get(name, ""))]


def _is_read_at_import(name: str, value: str) -> bool:
    if name in ALLOCATOR:
        return "backend" in value
    return name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER)


def _differs(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return before.get(name) != now.get(name)


def _threads(names: tuple[str, ...], environment: Mapping[str, str]) -> int:
    """Return the first variable's thread count, or the number of usable cores."""
    for name in names:
        value = environment.get(name, "").split(",")[0].strip()
        if value.isdigit() and int(value) > 0:
            return int(value)
    return usable_cores()
