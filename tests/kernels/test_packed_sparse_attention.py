"""Attention over chosen keys in packed rows: each document as if it were alone, whatever its neighbours are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays.kernels.sparse_attention import packed, reference

HEADS, DIM, VALUE, SLOTS, SCALE = 3, 6, 4, 5, 0.4
LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=5)
"""Queries and keys of each document; an empty one is one, too."""


def boundaries(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def row(documents: list[tuple[int, int]], padding: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of attention for a packed row. Choices may be of no key; rows of padding look like real ones."""
    generator = torch.Generator().manual_seed(3)
    queries, keys = (sum(each) for each in zip(*documents, strict=True))
    most = max(count for _, count in documents)
    return {
        "query": torch.randn(queries + padding, HEADS, DIM, generator=generator, dtype=torch.float64),
        "key": torch.randn(max(keys + padding, 1), 1, DIM, generator=generator, dtype=torch.float64),
        "indices": torch.randint(-2, most + 3, (queries + padding, SLOTS), generator=generator, dtype=dtype),
        "cu_seqlens_q": boundaries([count for count, _ in documents]),
        "cu_seqlens_k": boundaries([count for _, count in documents], torch.int64),
        "scale": SCALE,
        "value_channels": VALUE,
        "sink": torch.randn(HEADS, generator=generator, dtype=torch.float64),
        "bias": torch.randn(queries + padding, SLOTS, generator=generator, dtype=torch.float64),
    }


def alone(made: dict[str, Any], documents: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of each document by itself, one behind another; those of padding are of no key."""
    outputs, sums = [], []
    begin_q = begin_k = 0
    count_q = made["query"].size(0)
    for queries, keys in [*documents, (count_q - sum(count for count, _ in documents), 0)]:
        mine = slice(begin_q, begin_q + queries)
        key = made["key"][begin_k : begin_k + keys] if keys else made["key"].new_zeros(1, 1, DIM)
        indices = made["indices"][mine]
        output, lse = reference.attend(
            made["query"][mine].unsqueeze(1),
            key.unsqueeze(1),
            indices.masked_fill((indices < 0) | (indices >= keys), -1).unsqueeze(0),
            SCALE,
            VALUE,
            made["sink"],
            made["bias"][mine].unsqueeze(0),
        )
        outputs.append(output.squeeze(1))
        sums.append(lse.squeeze(1))
        begin_q, begin_k = begin_q + queries, begin_k + keys
    return torch.cat(outputs), torch.cat(sums)


@given(documents=LENGTHS, padding=st.integers(0, 3), dtype=st.sampled_from([torch.int32, torch.int64]))
@settings(deadline=None, max_examples=60)
def test_each_document_is_as_if_it_were_alone(
    documents: list[tuple[int, int]], padding: int, dtype: torch.dtype
) -> None:
    made = row(documents, padding, dtype)
    learned = [made[name].requires_grad_() for name in ("query", "key", "sink")]

    output, lse = packed.attend(**made)
    expected, expected_lse = alone(made, documents)

    assert torch.allclose(output, expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(lse.double(), expected_lse.double(), rtol=1e-6, atol=1e-6)
    for found, true in zip(
        torch.autograd.grad(output.square().sum(), learned, allow_unused=True),
        torch.autograd.grad(expected.square().sum(), learned, allow_unused=True),
        strict=True,
    ):
        assert found is not None
        assert torch.allclose(found, torch.zeros_like(found) if true is None else true, rtol=1e-5, atol=1e-5)


def test_nothing_is_asked_of_the_device() -> None:
    made = row([(3, 4), (2, 5)], 1, torch.int32)
    asked = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        packed.choices_in_row(made["indices"], made["cu_seqlens_q"], made["cu_seqlens_k"])

    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"} & set(asked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"query": torch.zeros(3, 1, 2, 6)},
            "packed query, key and indices must be (queries, heads, dim), (keys, 1, dim)",
        ),
        ({"cu_seqlens_q": torch.tensor([0.0, 3.0])}, "cu_seqlens must be int32 or int64 of (documents + 1,), not"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 4])}, "must be of the same documents, at least one, not of 1 and 2"),
        (
            {"cu_seqlens_q": torch.tensor([0]), "cu_seqlens_k": torch.tensor([0])},
            "must be of the same documents, at least one, not of 0 and 0",
        ),
        (
            {"cu_seqlens_k": torch.zeros(2, dtype=torch.int32, device="meta")},
            "indices and cu_seqlens must be on one device, not on cpu and meta",
        ),
    ],
)
def test_inconsistent_arguments_are_named(changes: dict[str, Any], says: str) -> None:
    made = row([(3, 4)], 0, torch.int32) | changes

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the sentence is tested below
        packed.attend(**made)

    assert says in str(error.value)
