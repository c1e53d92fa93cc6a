"""The scatter of top-k indices into the DSA index mask: branchless, and bit for bit what the eager original writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dsa_source import EditedTree, edited, install, module_of, statement_edits, text_of, trees, verdicts
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import STAND_INS
from warm_python import MEGATRON

from megacpp_overlays.feature_probes.dsa_branchless_scatter import BRANCHY, MASKING
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Overlay, Verdict
from megacpp_overlays.overlays.dsa_branchless_scatter import PARTS
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

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


# Probe


def test_each_stand_in_has_it_in_its_own_place() -> None:
    assert verdicts(PARTS, DirectoryTree(SPRING)) == {"dsa": BRANCHY}
    assert verdicts(PARTS, DirectoryTree(JUNE)) == {"dsa_masking": BRANCHY}


def test_every_tree_is_recognised(tree: Path) -> None:
    assert Verdict.UNRECOGNISED.value not in verdicts(PARTS, DirectoryTree(tree)).values()


def test_no_statement_of_the_branchy_scatter_may_change(dsa_tree: Path, part: Overlay) -> None:
    text = text_of(DirectoryTree(dsa_tree), part.target.module)
    for what, changed in statement_edits(text, part.target.symbol):
        finding = examine(part, EditedTree(DirectoryTree(dsa_tree), part.target.module, changed))
        assert finding.verdict is Verdict.UNRECOGNISED, what


@pytest.mark.parametrize(
    "later", ["end = min(", "picked = topk_indices", "rows = first", "real = picked >= 0", "batches, offsets, slots ="]
)
def test_a_name_that_is_read_before_it_is_bound_is_not_recognised(later: str) -> None:
    lines = text_of(DirectoryTree(JUNE), MASKING.module).splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if "def scatter_topk" in line)
    at = next(n for n, line in enumerate(lines) if n > start and later in line)
    changed = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
    if lines[at + 1].rstrip().endswith(":"):  # into the block that reads it
        indent = " " * (len(lines[at + 2]) - len(lines[at + 2].lstrip()))
        changed[at + 1] = indent + lines[at].lstrip()

    finding = examine(PARTS[1], EditedTree(DirectoryTree(JUNE), MASKING.module, "".join(changed)))

    assert finding.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(picked < 0).any()", "(picked < 0).all()"),
        ("(picked < 0).any()", "(picked <= 0).any()"),
        ("real = picked >= 0", "real = picked > 0"),
        ("index_mask[batches, rows, keys] = 0.0", "index_mask[batches, rows, keys] = 1.0"),
        ("index_mask[batches, rows, keys] = 0.0", "topk_indices[batches, rows, keys] = 0.0"),
        ("scatter_(-1, picked, 0.0)", "scatter_add_(-1, picked, 0.0)"),
        ("scatter_(-1, picked, 0.0)", "scatter_(1, picked, 0.0)"),
        ("rows = first + offsets", "rows = first - offsets"),
        ("rows = first + offsets", "rows = start + offsets"),
        ("seq_chunk_size=256", "seq_chunk_size=512"),
        ("seq_chunk_size=256", "seq_chunk_size=256, value=0.0"),
        ("(index_mask, topk_indices, *,", "(index_mask, topk_indices, use_relu, *,"),
        ("def scatter_topk_into_index_mask", "@traced\ndef scatter_topk_into_index_mask"),
        ("def scatter_topk_into_index_mask", "async def scatter_topk_into_index_mask"),
        ("def build_causal", "scatter_topk_into_index_mask = traced(scatter_topk_into_index_mask)\ndef build_causal"),
        ("def build_causal", "from elsewhere import scatter_topk_into_index_mask\ndef build_causal"),
    ],
)
def test_other_edits_are_not_recognised(old: str, new: str) -> None:
    assert edited(DirectoryTree(JUNE), PARTS[1], old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = idx_chunk.clamp_min(0) if valid_topk.any() else idx_chunk"),
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = idx_chunk[valid_topk.nonzero()]"),
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = torch.where(valid_topk)"),
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = read(idx_chunk)"),
        ("index_mask[:, s0:s1].scatter_reduce_(", "index_mask[:, s0:s1].index_fill("),
        (
            "safe_idx = idx_chunk.clamp_min(0)",
            "safe_idx = idx_chunk.clamp_min(0) if idx_chunk.min() < 0 else idx_chunk",
        ),
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = idx_chunk.clamp(0, int(idx_chunk.max()))"),
        ("safe_idx = idx_chunk.clamp_min(0)", "safe_idx = idx_chunk[idx_chunk >= 0]"),
        ("torch.zeros((), dtype", "torch.full((), 1.0, dtype"),
    ],
)
def test_the_repair_counts_only_as_it_was_read(old: str, new: str, wheel: Callable[[str, str], Path]) -> None:
    tree = ArchiveTree(wheel("megatron-core", "0.19.2"))
    assert PARTS[1].target is MASKING

    assert edited(tree, PARTS[1], old, new).verdict is Verdict.UNRECOGNISED


def test_a_branch_without_any_is_no_repair() -> None:
    text = text_of(DirectoryTree(JUNE), MASKING.module)
    for old, new in (("(picked < 0).any()", "picked.min() < 0"), ("torch.any(real)", "real.max()")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    branch, _, rest = text.partition("                batches, offsets")
    text = f"{branch}                index_mask[:, first:end].scatter_(-1, picked[real], 0.0)\n        else:{rest.partition('else:')[2]}"

    finding = examine(PARTS[1], EditedTree(DirectoryTree(JUNE), MASKING.module, text))

    assert finding.verdict is Verdict.UNRECOGNISED


# The same bits


FLOATS = st.sampled_from([float("-inf"), 0.0, -0.0, 1.0, 2.5, -1e-30, float("inf"), float("nan")])


@st.composite
def problems(draw: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A mask with any content, valid indices and sentinels for it, and a chunk size."""
    batch, queries, keys, topk = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 5), (1, 5), (0, 4)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    values = draw(st.lists(FLOATS, min_size=batch * queries * keys, max_size=batch * queries * keys))
    wanted = st.integers(-1 if draw(st.booleans()) else 0, keys - 1)
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
    """Return the same content with other strides, and a stranger between any two queries."""
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


CASES = {
    "sentinels beside real zeros": [[[-1, 0, -1], [0, 0, 2]]],
    "a row of sentinels": [[[-1, -1, -1], [1, 2, 0]]],
    "only sentinels": [[[-1, -9, -1], [-1, -1, -1]]],
    "duplicates": [[[2, 2, 2], [3, -1, 3]]],
    "no sentinel": [[[0, 1, 2], [3, 3, 0]]],
}


@pytest.mark.parametrize("indices", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_zero_that_was_there_stays(original: Scatter, scatter: Scatter, indices: Any, dtype: torch.dtype) -> None:
    mask = torch.tensor([[[0.0, float("-inf"), 3.0, float("nan")], [-0.0, 0.0, float("-inf"), -2.0]]])
    expected = copy.deepcopy(mask)
    original(expected, torch.tensor(indices, dtype=dtype))

    scatter(mask, torch.tensor(indices, dtype=dtype))

    assert bits(mask) == bits(expected)


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


# Two locks: what the text does not show, the loaded function does


def test_the_witness_agrees_with_the_probe(module: ModuleType, part: Overlay) -> None:
    assert part.witness is not None
    assert part.witness(module).broken
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


def test_after_installing_the_self_test_passes(dsa_tree: Path, part: Overlay) -> None:
    patched = module_of(dsa_tree, part.target.module)
    undo = install(part, BRANCHY, patched)
    assert not part.self_test(patched).broken
    undo()
    assert part.self_test(patched).broken


LOAD = """
import importlib, json, pickle
import megacpp_overlays
module = importlib.import_module({module!r})
function = getattr(module, {symbol!r})
records = [r for r in megacpp_overlays.audit().records if r.overlay.id == "dsa-branchless-scatter" and r.seams]
print(json.dumps(dict(
    decisions=[r.decision.value for r in records], seams=[s for r in records for s in r.seams],
    pickled=pickle.loads(pickle.dumps(function)) is function, wrapped=hasattr(function, "__wrapped__"),
)))
"""


@pytest.mark.parametrize("stand_in", [SPRING, JUNE], ids=["spring", "june"])
def test_loaded_in_a_fresh_process_it_is_active_and_pickles_by_reference(
    stand_in: Path, run_python: Any, tmp_path: Path
) -> None:
    target = part_of(stand_in).target
    code = LOAD.format(module=target.module, symbol=target.symbol)

    on = json.loads(run_python(code, stand_in, after=MEGATRON, MEGACPP_OVERLAYS_LOG=str(tmp_path / "log")).stdout)
    off = json.loads(run_python(code, stand_in, after=MEGATRON, MEGACPP_OVERLAYS="off").stdout)

    assert on == {"decisions": ["active"], "seams": [str(target)], "pickled": True, "wrapped": True}
    assert off == {"decisions": [], "seams": [], "pickled": True, "wrapped": False}
