"""Which variables come too late for a worker that has torch loaded already."""

from __future__ import annotations

import pytest

from lockstep.launch.forking.late_environment import without_effect


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("TORCHINDUCTOR_FREEZING", "1", True),
        ("TORCH_COMPILE_DISABLE", "1", True),
        ("KMP_AFFINITY", "compact", True),
        ("OMP_PROC_BIND", "true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
        ("CUDA_VISIBLE_DEVICES", "0", False),
        ("CUDA_LAUNCH_BLOCKING", "1", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", False),
        ("NCCL_DEBUG", "INFO", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", False),
        ("MASTER_ADDR", "a", False),
        ("RANK", "1", False),
        ("TORCH_HOME", "/tmp", False),
        ("TORCHINDUCTOR_CACHE_DIR", "/tmp", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
    ],
)
def test_variables_that_only_an_import_reads_are_reported(name: str, value: str, reported: bool) -> None:
    assert without_effect({}, {name: value}) == ([name] if reported else [])
    assert without_effect({name: value}, {name: value}) == []
