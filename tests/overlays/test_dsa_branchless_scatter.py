"""The scatter of top-k indices into the DSA index mask: branchless, with the bits of the eager original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dsa_source import install, module_of, text_of, trees, verdicts
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import STAND_INS

from megacpp_overlays.feature_probes.dsa_branchless_scatter import BRANCHY, MASKING
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.overlays.dsa_branchless_scatter import PARTS
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source.file_trees import DirectoryTree

SPRING, JUNE = STAND_INS["dsa-spring"], STAND_INS["dsa-june"]
Scatter = Callable[..., None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    trees(metafunc, "dsa_tree", "dsa-spring", "dsa-june")


def part_of(tree: Path) -> Overlay:
    """Return the part whose target is broken in a tree, or skip."""
    broken = [part for part in PARTS if examine(part, DirectoryTree(tree)).verdict is Verdict.BROKEN]
    if not broken:
        pytest.skip("this tree has no branchy scatter")
    return broken[0]


@pytest.fixture
def part(dsa_tree: Path) -> Overlay:
    return part_of(dsa_tree)


@pytest.fixture
def module(dsa_tree: Path, part: Overlay) -> ModuleType:
    return module_of(dsa_tree, part.target.module)


@pytest.fixture
def original(module: ModuleType, part: Overlay) -> Scatter:
    found: Scatter = getattr(module, part.target.symbol)
    return found


@pytest.fixture
def scatter(dsa_tree: Path, part: Overlay) -> Iterator[Scatter]:
    """The seam, in a copy of the module."""
    patched = module_of(dsa_tree, part.target.module)
    undo = install(part, BRANCHY, patched)
    yield getattr(patched, part.target.symbol)
    undo()


def test_each_stand_in_has_it_in_its_own_place() -> None:
    assert verdicts(PARTS, DirectoryTree(SPRING)) == {"dsa": BRANCHY}
    assert verdicts(PARTS, DirectoryTree(JUNE)) == {"dsa_masking": BRANCHY}


# The same bits


FLOATS = st.sampled_from([float("-inf"), 0.0, -0.0, 1.0, 2.5, -1e-30, float("inf"), float("nan")])


@st.composite
def problems(draw: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A mask with any content, valid indices and sentinels for it, and a chunk size."""
    batch, queries, keys, topk = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 5), (1, 5), (0, 4)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    values = draw(st.lists(FLOATS, min_size=batch * queries * keys, max_size=batch * queries * keys))
    wanted = st.integers(-2 if draw(st.booleans()) else 0, keys - 1)
    picked = draw(st.lists(wanted, min_size=batch * queries * topk, max_size=batch * queries * topk))
    indices = torch.tensor(picked, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    mask = torch.tensor(values, dtype=dtype).reshape(batch, queries, keys)
    return mask, indices.reshape(batch, queries, topk), draw(st.sampled_from([1, 2, 256]))


def bits(tensor: torch.Tensor) -> list[Any]:
    """Return the bits, every NaN the same in half precision: on the CPU, torch's own `scatter_` rewrites untouched ones.

    (torch 2.11, bfloat16, on a slice: 0x7fc0 becomes 0xffff.)
    """
    if tensor.dtype is torch.float32:
        return [tensor.contiguous().view(torch.int32).tolist()]
    alike = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return [alike.contiguous().view(torch.int16).tolist()]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same content with other strides and with unrelated elements between any two queries."""
    return torch.stack((tensor, torch.full_like(tensor, 7.0)), dim=2).transpose(0, 1)[:, :, 0].transpose(0, 1)


@pytest.mark.unmeasured
@settings(max_examples=150, deadline=None)
@given(problem=problems(), contiguous=st.booleans())
@pytest.mark.parametrize("stand_in", [SPRING, JUNE], ids=["spring", "june"])
def test_any_mask_gets_the_same_bits(
    stand_in: Path, problem: tuple[torch.Tensor, torch.Tensor, int], contiguous: bool
) -> None:
    part, (mask, indices, step) = part_of(stand_in), problem
    module = module_of(stand_in, part.target.module)
    original = getattr(module, part.target.symbol)
    undo = install(part, BRANCHY, module)
    expected, found = mask.clone(), mask.clone() if contiguous else strided(mask)
    before = indices.clone()

    original(expected, indices, seq_chunk_size=step)
    getattr(module, part.target.symbol)(found, indices, seq_chunk_size=step)

    undo()
    assert bits(found) == bits(expected)
    assert torch.equal(indices, before)


@pytest.mark.parametrize("queries", [255, 256, 257, 513])
def test_chunks_meet_without_a_gap(original: Scatter, scatter: Scatter, queries: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    indices = torch.randint(-1, 9, (2, queries, 3), generator=generator, dtype=torch.int32)
    expected = torch.full((2, queries, 9), float("-inf"))
    found = expected.clone()
    original(expected, indices)

    scatter(found, indices)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("indices", [[[[4]]], [[[-1], [4]]], [[[2**40]]]], ids=["all valid", "one sentinel", "far out"])
def test_an_index_that_is_too_large_raises(original: Scatter, scatter: Scatter, indices: Any) -> None:
    given_indices = torch.tensor(indices)
    for function in (original, scatter):
        with pytest.raises((IndexError, RuntimeError)):
            function(torch.zeros(1, given_indices.size(1), 4), given_indices)


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 1), (2, 2, 1)], ids=str)
def test_indices_of_another_shape_are_refused(original: Scatter, scatter: Scatter, shape: tuple[int, ...]) -> None:
    for function in (original, scatter):
        with pytest.raises(AssertionError):
            function(torch.zeros(1, 2, 4), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(1, 0, 4), (0, 2, 4), (1, 2, 0)], ids=str)
def test_empty_problems_are_none(original: Scatter, scatter: Scatter, shape: tuple[int, ...]) -> None:
    for function in (original, scatter):
        mask = torch.zeros(shape)
        function(mask, torch.full((*shape[:2], 2), -1))
        assert mask.shape == shape


def test_gradients_are_those_of_the_original(original: Scatter, scatter: Scatter) -> None:
    gradients = []
    for function in (original, scatter):
        leaf = torch.ones(1, 2, 3, requires_grad=True)
        mask = leaf * 2
        function(mask, torch.tensor([[[0, -1], [2, 2]]]))
        mask.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


# Nothing for the host to read


def test_the_original_asks_the_device_and_the_seam_does_not(original: Scatter, scatter: Scatter) -> None:
    for function, reads in ((original, True), (scatter, False)):
        mask = torch.zeros(1, 2, 4)
        with graph_capture.host_reads() as seen:
            function(mask, torch.tensor([[[0, -1], [2, 1]]]))
        assert bool(seen) is reads
        assert not mask.requires_grad


def test_meta_tensors_pass(original: Scatter, scatter: Scatter) -> None:
    mask, indices = torch.zeros(1, 2, 4, device="meta"), torch.zeros(1, 2, 3, dtype=torch.int32, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        original(mask, indices)

    scatter(mask, indices)


def test_indices_may_be_on_another_device(scatter: Scatter) -> None:
    scatter(torch.zeros(1, 2, 4, device="meta"), torch.tensor([[[0, -1], [2, 1]]]))


@pytest.mark.unmeasured
def test_it_compiles_into_one_graph(scatter: Scatter) -> None:
    indices = torch.tensor([[[0, -1], [2, 1], [-1, -1]]])
    eager, compiled = torch.full((1, 3, 4), float("-inf")), torch.full((1, 3, 4), float("-inf"))
    scatter(eager, indices, seq_chunk_size=2)

    torch.compile(scatter, fullgraph=True, backend="aot_eager")(compiled, indices, seq_chunk_size=2)

    assert torch.equal(compiled, eager)


# Two locks: the witness and the self-test run the loaded function, in addition to the probe of its text


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType, part: Overlay) -> None:
    assert part.witness is not None
    assert part.witness(module).broken
    assert part.self_test(module).broken
    undo = install(part, BRANCHY, module)
    assert not part.self_test(module).broken
    undo()
    assert part.self_test(module).broken


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("index_mask[batches, rows, keys] = 0.0", "index_mask[batches, offsets, keys] = 0.0"),
        ("keys = picked[batches, offsets, slots]", "keys = picked[batches, offsets, offsets]"),
        ("end = min(queries, first + step)", "end = min(step, first + queries)"),
    ],
)
def test_a_name_in_the_wrong_place_is_seen_by_the_witness(old: str, new: str, tmp_path: Path) -> None:
    text = text_of(DirectoryTree(JUNE), MASKING.module)
    assert text.count(old) == 1
    for name, content in ((MASKING.module, text.replace(old, new)), (MASKING.module.replace("masking", "layout"), "")):
        file = tmp_path / (name.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    try:
        witness = PARTS[1].witness
        assert witness is not None
        assert not witness(module_of(tmp_path, MASKING.module)).broken
    except (IndexError, RuntimeError):
        pass  # as good: the loader takes it for a refusal
