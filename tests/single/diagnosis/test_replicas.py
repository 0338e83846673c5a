"""Fingerprints of replicas, and the message about replicas that differ."""

from __future__ import annotations

import pytest
import torch

from lockstep.diagnosis.replicas import PART, describe, fingerprints

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_bit_of_any_element_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (2, 3, 4, 5)).to(dtype)
    before = fingerprints([tensor])
    raw = tensor.view(torch.uint8)
    for place in (0, raw.numel() // 2 // tensor.element_size() * tensor.element_size()):  # little-endian: lowest first
        raw.view(-1)[place] ^= 1
        assert fingerprints([tensor]) != before
        raw.view(-1)[place] ^= 1
    assert fingerprints([tensor]) == before


def test_a_fingerprint_is_that_of_the_values_whatever_the_layout() -> None:
    tensor = torch.randn(4, 3, 5, 5)
    others = [tensor.to(memory_format=torch.channels_last), tensor.transpose(0, 1), tensor.repeat(2, 1, 1, 1)[:4]]
    assert {int(part) for part in fingerprints([tensor, *others])} == {int(fingerprints([tensor]))}


@pytest.mark.parametrize("shape", [(7, PART // 20, 3), (1, PART + 5), (PART + 5,), (5, PART // 4)])
def test_large_tensors_are_summed_in_parts(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    expected = tensor.view(torch.int32).sum(dtype=torch.int64)
    for same in (tensor, tensor.transpose(0, -1)):
        assert fingerprints([same]).tolist() == [int(expected)]


def test_empty_lone_and_boolean_tensors_have_fingerprints_too() -> None:
    tensors = [torch.empty(0, 3), torch.tensor(7), torch.tensor([True, False, True]), torch.tensor(-1.5)]
    assert fingerprints(tensors).tolist() == [0, 7, 2, torch.tensor(-1.5).view(torch.int32).item()]
    huge = torch.full((3,), 2**63 - 1)  # sums wrap around, which is no overflow of anything
    assert fingerprints([huge]).item() == 2**63 - 3


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([("a", [1]), ("a", [2])], "workers 0 on a, 1 on a differ from one another in 1 of 9"),
        ([("a", [1]), ("a", [2]), ("b", [1])], "worker 1 on a differs from the other 2 in 1 of 9"),
        ([("a", [3])] + [("b", [1])] * 3 + [("c", [2])], "workers 0 on a, 4 on c differ from the other 3 in"),
        ([("a", [1])] * 2 + [("b", [2])] * 2, "workers 0 on a, 1 on a, 2 on b, 3 on b differ from one another"),
        ([("a", [rank]) for rank in range(12)], "7 on a and 4 more differ from one another"),
    ],
)
def test_the_workers_that_differ_from_the_majority_are_named(workers: list[tuple[str, list[int]]], words: str) -> None:
    said = describe(
        40,
        ["fc.weight"],
        9,
        {rank: (host, values, "a CPU with AVX2") for rank, (host, values) in enumerate(workers)},
        "CAUSES",
        "SWITCH",
    )
    assert said.endswith(". CAUSES")
    assert words in said
    assert said.startswith("the replicas differ after step 40: ")
    assert "first in fc.weight" in said


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([([1], "AVX2"), ([1], "AVX2"), ([2], "AVX512")], "Worker 2 runs on AVX512, worker 0 on AVX2, and different"),
        ([([1], "AVX512"), ([2], "AVX2")], "Worker 1 runs on AVX2, worker 0 on AVX512, and different"),
        ([([1], "AVX2"), ([1], "AVX512"), ([2], "AVX2")], "CAUSES"),  # worker 0 is like worker 2
    ],
)
def test_unlike_processors_are_named_where_they_may_be_the_cause(
    workers: list[tuple[list[int], str]], words: str
) -> None:
    assert words in describe(
        40, ["fc.weight"], 9, {rank: ("a", *worker) for rank, worker in enumerate(workers)}, "CAUSES", "SWITCH"
    )
