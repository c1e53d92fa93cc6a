"""DSA's validations: upstream's own outside of a CUDA graph capture, and inside one by construction, on the device, or declined.

These tests need no GPU: `graph_capture.rehearsal` makes the gates answer as in a capture, on CPU tensors. Tests of real
captures are in tests/gpu/test_dsa_capture.py.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from dsa_source import (
    AttnMaskType,
    EditedTree,
    install,
    module_of,
    text_of,
    trees,
    verdicts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from places import HANG_S, ROOT, SUPPORT
from tensor_writes import COPIES, WRITES, Write
from trees import STAND_INS
from warm_python import MEGATRON

from megacpp_overlays.feature_probes import dsa_capture_gates as feature
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.dsa_capture_gates import FUSED_LOSS, PARTS, SINGLE_FILE
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source import forms
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

DSA, LAYOUT, MASKING = PARTS
CPU = torch.device("cpu")
SPRING, JUNE = STAND_INS["dsa-spring"], STAND_INS["dsa-june"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    trees(metafunc, "dsa_tree", "dsa-spring", "dsa-june")


class Gates:
    """The functions of one tree by their plain names, with and without the seams."""

    def __init__(self, tree: Path) -> None:
        found = verdicts(PARTS, DirectoryTree(tree))
        single = found.get("dsa") in {feature.SINGLE, feature.SINGLE_FUSED}
        if not single and found.get("dsa_masking") != feature.EQUAL_BOUNDS:
            pytest.skip("no torch.equal in this tree")
        self.parts = [DSA] if single else [LAYOUT, MASKING]
        self.modules = {part: module_of(tree, part.target.module) for part in self.parts}
        self.shapes = {part: found[part.target.module.rpartition(".")[2]] for part in self.parts}
        self.names = SINGLE_FILE if single else {name: name for name in SINGLE_FILE}

    def __getattr__(self, name: str) -> Any:
        plain = {"positions": feature.POSITIONS, "mask": feature.MASK, "bounds": feature.BOUNDS}[name]
        return next(vars(m)[self.names[plain]] for m in self.modules.values() if self.names[plain] in vars(m))

    def install(self) -> None:
        self.undo = [install(part, self.shapes[part], module) for part, module in self.modules.items()]

    def built(self, **changes: Any) -> dict[str, Any]:
        """Build the mask of a layout; return the arguments of the bounds function."""
        given = {
            "sq": 4, "skv": 4, "b": 2, "device": CPU, "cp_size": 1, "cp_rank": 0, "cp_comm_type": "allgather",
            "cp_group": None, "attn_mask_type": AttnMaskType.causal, "attention_mask": None, "position_ids": None,
            "packed_seq_params": None, **changes,
        }  # fmt: skip
        mask, varlen = self.mask(**given)
        names = ("varlen_starts", "varlen_ends", "key_positions")
        ranges = dict(zip(names, varlen or (None, None, None), strict=True))
        return {"sq": given["sq"], "skv": given["skv"], "device": CPU, "mask": mask, **ranges}


@pytest.fixture
def upstream(dsa_tree: Path) -> Gates:
    return Gates(dsa_tree)


@pytest.fixture
def patched(dsa_tree: Path) -> Iterator[Gates]:
    gates = Gates(dsa_tree)
    gates.install()
    yield gates
    for undo in gates.undo:
        undo()


def packed(*cu_seqlens: int) -> SimpleNamespace:
    lengths = torch.tensor(cu_seqlens, dtype=torch.int32)
    padded = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **padded)


LAYOUTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "more keys": {"skv": 6},
    "second of two ranks": {"skv": 8, "cp_size": 2, "cp_rank": 1, "position_ids": torch.tensor([[2, 3, 4, 5]])},
    "packed": {"packed_seq_params": packed(0, 1, 4)},
}


def lists(bounds: Any) -> Any:
    return None if bounds is None else [(each.dtype, each.tolist()) for each in bounds]


# Probes


def test_the_stand_ins_compare_on_the_host() -> None:
    assert verdicts(PARTS, DirectoryTree(SPRING)) == {"dsa": feature.SINGLE_FUSED}
    expected = {"dsa_layout": feature.EQUAL_POSITIONS, "dsa_masking": feature.EQUAL_BOUNDS}
    assert verdicts(PARTS, DirectoryTree(JUNE)) == expected


VOUCHED_FOR = {
    LAYOUT: (
        *(feature.POSITIONS, "get_cp_positions_from_layout", "build_zigzag_cp_local_positions"),
        *("normalize_cp_comm_type", "get_packed_qk_cu_seqlens"),
    ),
    MASKING: (
        *(feature.BOUNDS, feature.MASK, "normalize_varlen_bounds", "_build_default_causal_mask"),
        *("build_causal_mask_from_positions", "generate_varlen_mask_params_for_positions"),
    ),
    DSA: (
        *(*SINGLE_FILE.values(), FUSED_LOSS),
        *("_build_causal_mask_from_positions", "_get_cp_positions_from_layout"),
    ),
}
"""Functions that a mark vouches for, by module: those that make masks or key positions, and those that read them."""


@pytest.mark.parametrize(
    ("part", "shapes", "modules"),
    [
        (MASKING, {feature.EQUAL_BOUNDS}, (LAYOUT, MASKING)),
        (DSA, {feature.SINGLE, feature.SINGLE_FUSED}, (DSA,)),
    ],
    ids=["masking", "single file"],
)
def test_the_verdict_rests_on_all_that_a_mark_vouches_for(
    part: Overlay, shapes: set[str], modules: tuple[Overlay, ...]
) -> None:
    """After a change of any place of a form, the form is not recognised: see `tests/probes/test_forms.py`."""
    record = forms.record(part.id, part.target.module)
    wanted = {f"{each.target.module}:{name}" for each in modules for name in VOUCHED_FOR[each]}
    broken = [form for form in record.forms if form.shape in shapes]

    assert broken
    for form in broken:
        looked_at = {place for place, known in zip(record.places, form.digests, strict=True) if known != forms.ANY}
        assert wanted <= looked_at, form.trees


# Outside a capture


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outside_a_capture_everything_is_upstreams(upstream: Gates, patched: Gates, layout: dict[str, Any]) -> None:
    answers = []
    for gates in (upstream, patched):
        with graph_capture.host_reads() as read:
            bounds = gates.bounds(**gates.built(**layout))
        answers.append((lists(bounds), read))

    assert answers[0] == answers[1]
    assert "equal" in answers[0][1]


def test_outside_a_capture_a_mask_with_holes_declines_and_unequal_rows_raise(patched: Gates) -> None:
    given = patched.built()
    given["mask"] = given["mask"].clone()
    given["mask"][3, 1] = float("-inf")

    assert patched.bounds(**given) is None
    with pytest.raises(AssertionError):
        patched.positions(torch.tensor([[0, 1], [1, 2]]), 2, CPU)


# Inside a rehearsed capture


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_built_mask_passes_with_the_same_bounds(upstream: Gates, patched: Gates, layout: dict[str, Any]) -> None:
    expected = upstream.bounds(**upstream.built(**layout))
    assert expected is not None

    with graph_capture.rehearsal():
        built = patched.built(**layout)
        with graph_capture.host_reads() as read:
            found = patched.bounds(**built)

    assert lists(found) == lists(expected)
    assert read == []


def test_a_mask_from_outside_declines(patched: Gates) -> None:
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None].expand(2, 1, 4, 4)
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        built = patched.built(attn_mask_type=None, attention_mask=hidden)
        assert patched.bounds(**built) is None
        assert patched.bounds(**{**built, "mask": built["mask"][0]}) is None
    assert read == []


BUILT = pytest.mark.parametrize(
    ("layout", "name"),
    [(LAYOUTS["causal"], "mask"), (LAYOUTS["packed"], "key_positions")],
    ids=["mask", "key positions"],
)


@BUILT
@pytest.mark.parametrize(
    "change", [torch.clone, lambda tensor: tensor[:-1], *COPIES.values()], ids=["copied", "cut", *COPIES]
)
def test_a_copied_or_cut_tensor_declines(patched: Gates, layout: dict[str, Any], name: str, change: Any) -> None:
    with graph_capture.rehearsal():
        built = patched.built(**layout)
        assert patched.bounds(**built) is not None
        assert patched.bounds(**{**built, name: change(built[name])}) is None
        assert vars(built[name]) == {}


@BUILT
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_any_write_to_a_built_tensor_is_noticed_on_the_device(
    patched: Gates, layout: dict[str, Any], name: str, write: Write
) -> None:
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        built = patched.built(**layout)
        same, other = built[name].clone(), built[name].flip(-1)

        write(built[name], same)
        assert patched.bounds(**built) is not None

        write(built[name], other)
        with pytest.raises(RuntimeError, match="was written to after it was built"):
            patched.bounds(**built)
    assert read == []


def test_key_positions_of_another_length_decline(upstream: Gates, patched: Gates) -> None:
    with graph_capture.rehearsal():
        built = patched.built(**LAYOUTS["packed"], skv=8)
        assert patched.bounds(**built) is not None
        assert patched.bounds(**{**built, "skv": 4}) is None
    assert upstream.bounds(**{**built, "skv": 4}) is None


def test_a_mask_that_was_made_before_the_capture_declines(patched: Gates) -> None:
    built = patched.built()
    with graph_capture.rehearsal():
        assert patched.bounds(**built) is None


def test_without_a_mask_upstream_decides_by_itself(upstream: Gates, patched: Gates) -> None:
    given = {**upstream.built(), "mask": None}
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        assert lists(patched.bounds(**given)) == lists(upstream.bounds(**given))
    assert read == []


def test_arguments_that_do_not_fit_raise_as_before(patched: Gates) -> None:
    built = patched.built(packed_seq_params=packed(0, 4))
    with graph_capture.rehearsal(), pytest.raises(ValueError, match="ends"):
        patched.bounds(**{**built, "varlen_ends": None})


@pytest.mark.unmeasured
@settings(deadline=None)
@given(row=st.lists(st.integers(0, 9), min_size=1, max_size=4), rows=st.integers(1, 3), change=st.integers(0, 2))
@pytest.mark.parametrize("stand_in", [SPRING, JUNE], ids=["spring", "june"])
def test_positions_are_checked_on_the_device(stand_in: Path, row: list[int], rows: int, change: int) -> None:
    gates = Gates(stand_in)
    gates.install()
    ids = torch.tensor([row] * rows)
    ids[-1, 0] += change  # upstream compares the first row with the last
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        if rows > 1 and change:
            with pytest.raises(RuntimeError, match="position ids differ"):
                gates.positions(ids, len(row), CPU)
        else:
            assert gates.positions(ids, len(row), CPU).tolist() == ids[0].tolist()
            assert gates.positions(ids, len(row) + 1, CPU) is None
    for undo in gates.undo:
        undo()
    assert read == []


def test_rows_that_are_one_row_in_memory_need_no_comparison(patched: Gates) -> None:
    class ComparisonRecorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch._assert_async
            return func(*args, **(kwargs or {}))

    with graph_capture.rehearsal(), ComparisonRecorder():
        assert patched.positions(torch.arange(3).expand(4, 3), 3, CPU).tolist() == [0, 1, 2]


@pytest.mark.parametrize("ids", [None, torch.arange(3), torch.arange(3)[None]], ids=["none", "flat", "one row"])
def test_positions_of_one_row_are_left_to_upstream(upstream: Gates, patched: Gates, ids: Any) -> None:
    with graph_capture.rehearsal():
        found, expected = patched.positions(ids, 3, CPU), upstream.positions(ids, 3, CPU)
    assert (None if found is None else found.tolist()) == (None if expected is None else expected.tolist())


def test_the_fused_loss_of_spring_declines_only_in_a_capture() -> None:
    module = module_of(SPRING, DSA.target.module)
    vars(module)["lighting_indexer"] = lambda *given: (torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    undo = install(DSA, feature.SINGLE_FUSED, module)
    fused, arguments = vars(module)[FUSED_LOSS], (torch.ones(1), None, None, 2, None, None, 8)

    assert fused(*arguments, loss_coeff=2.0)[1] == 8
    with graph_capture.rehearsal():
        assert fused(*arguments, loss_coeff=2.0) is None
    undo()


def test_a_fused_loss_with_a_repair_of_its_own_runs_outside_a_capture_and_declines_inside_one() -> None:
    """No probe reads its body. It runs unchanged, or declines, and callers then compute the dense loss."""
    start = "    if lighting_indexer is None:\n"
    repair = f"    if needs_repair():\n        return repaired(q)\n{start}"
    text = text_of(DirectoryTree(SPRING), DSA.target.module).replace(start, repair)
    tree = EditedTree(DirectoryTree(SPRING), DSA.target.module, text)
    module, asked = module_of(tree, DSA.target.module), list[bool]()
    vars(module).update(needs_repair=lambda: True, repaired=lambda q: asked.append(True) or ("indices", q.sum()))
    undo = install(DSA, feature.SINGLE_FUSED, module)
    fused, arguments = vars(module)[FUSED_LOSS], (torch.ones(3), None, None, 2, None, None, 8)

    assert not DSA.self_test(module).broken
    assert fused(*arguments)[1] == 3
    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        assert fused(*arguments) is None
    assert asked == [True]
    assert read == []
    undo()


def test_the_self_test_looks_up_the_fused_loss_in_its_module() -> None:
    text = text_of(DirectoryTree(SPRING), DSA.target.module).replace("_sparse_kl(q, k,", "_sparse_kl(q_indexer, k,")
    module = module_of(EditedTree(DirectoryTree(SPRING), DSA.target.module, text), DSA.target.module)
    undo = install(DSA, feature.SINGLE_FUSED, module)
    loss = vars(module)[FUSED_LOSS]
    assert not DSA.self_test(module).broken

    vars(module)[FUSED_LOSS] = loss.__wrapped__
    assert DSA.self_test(module).broken

    vars(module)[FUSED_LOSS] = loss
    undo()


# A rehearsal belongs to one thread


def test_a_rehearsal_ends_while_one_of_another_thread_goes_on() -> None:
    begun, inside, ended = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, list[bool]] = {"first": [], "second": []}

    def first() -> None:
        with graph_capture.rehearsal():
            begun.set()
            inside.wait(HANG_S)
            seen["first"].append(graph_capture.capturing(CPU))
        seen["first"].append(graph_capture.capturing(CPU))
        ended.set()

    def second() -> None:
        begun.wait(HANG_S)
        seen["second"].append(graph_capture.capturing(CPU))
        with graph_capture.rehearsal():
            inside.set()
            ended.wait(HANG_S)
            seen["second"].append(graph_capture.capturing(CPU))
        seen["second"].append(graph_capture.capturing(CPU))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)

    assert seen == {"first": [True, False], "second": [False, True, False]}
    assert not graph_capture.capturing(CPU)


# Sequence lengths of two ranks


RANKS = """
import json, sys, torch, torch.distributed as dist
from pathlib import Path
from dsa_source import install, module_of
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source import forms
from megacpp_overlays.feature_probes import dsa_capture_gates as feature
from megacpp_overlays.overlays.dsa_capture_gates import FUSED_LOSS, PARTS, SINGLE_FILE
from megacpp_overlays.source.file_trees import ArchiveTree

def answer(validate, sq, skv):
    try:
        with graph_capture.host_reads() as read:
            validate(sq=sq, skv=skv, cp_size=2, cp_group=dist.group.WORLD, device=torch.device("cpu"))
        return "passes", bool(read)
    except RuntimeError as error:
        return str(error).partition(";")[0][:60], bool(read)

def run(rank, folder, wheel):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module = module_of(ArchiveTree(Path(wheel)), PARTS[0].target.module, feature.LENGTHS)
    cases = {"same": (4, 8), "local keys": (4, 4), "other keys": (4, 6), "uneven": (4 + rank, 9)}
    found = {}
    for side in ("upstream", "patched"):
        if side == "patched":
            install(PARTS[0], feature.READ_LENGTHS, module)
        for name, (sq, skv) in cases.items():
            validate = getattr(module, feature.LENGTHS)
            found[f"{side}, {name}"] = answer(validate, sq, skv)
            if side == "patched":
                with graph_capture.rehearsal():
                    found[f"capturing, {name}"] = answer(validate, sq, skv)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()

torch.multiprocessing.start_processes(run, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, wheel: Callable[[str, str], Path]) -> list[dict[str, Any]]:
    """Return the answers of the length check of 0.19.2 on each of two gloo ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    command = ["-W", "ignore", "-c", RANKS, str(folder), str(wheel("megatron-core", "0.19.2"))]
    env = {"PATH": "", "PYTHONPATH": f"{SUPPORT}:{ROOT}", "MEGACPP_OVERLAYS": "off", "GLOO_SOCKET_IFNAME": "lo"}
    done = warm_python.run(command, env, after=MEGATRON, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


UNIFORM = "Non-packed DSA allgather CP expects uniform per-rank sequence lengths"[:60]


@pytest.mark.parametrize("case", ["same", "local keys", "other keys", "uneven"])
def test_outside_a_capture_lengths_are_read_as_upstream_does(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        said, read = rank[f"patched, {case}"]
        assert (
            [said, read] == rank[f"upstream, {case}"] == ["passes" if case in {"same", "local keys"} else UNIFORM, True]
        )


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("same", "passes"),
        ("local keys", "passes"),
        ("other keys", UNIFORM),
        ("uneven", "DSA: sequence lengths differ across context-parallel ranks"),
    ],
)
def test_in_a_capture_lengths_are_compared_on_the_device(ranks: list[dict[str, Any]], case: str, said: str) -> None:
    for rank in ranks:
        assert rank[f"capturing, {case}"] == [said, False]


@pytest.mark.parametrize("skv", [4, 8, 6])
def test_without_a_group_the_check_is_upstreams_and_compiles(skv: int, wheel: Callable[[str, str], Path]) -> None:
    module = module_of(ArchiveTree(wheel("megatron-core", "0.19.2")), DSA.target.module, feature.LENGTHS)
    undo = install(DSA, feature.READ_LENGTHS, module)
    validate = getattr(module, feature.LENGTHS)

    def step(x: torch.Tensor) -> torch.Tensor:
        validate(sq=4, skv=skv, cp_size=2, cp_group=None, device=x.device)
        return x + 1

    if skv == 6:
        with pytest.raises(RuntimeError, match="uniform"):
            step(torch.ones(1))
    else:
        assert torch.compile(step, fullgraph=True, backend="eager")(torch.ones(1)) == 2
    undo()


# Compiling and installing


@pytest.mark.unmeasured
def test_the_gates_still_compile_into_one_graph(patched: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in patched.modules.values():
        for each in (module, vars(module).get("dsa_layout", module)):
            monkeypatch.setitem(sys.modules, each.__name__, each)  # the compiler looks it up
    positions, build, bounds = patched.positions, patched.mask, patched.bounds

    def step(ids: torch.Tensor) -> Any:
        mask, _ = build(
            sq=3,
            skv=3,
            b=1,
            device=CPU,
            cp_size=1,
            cp_rank=0,
            cp_comm_type="allgather",
            cp_group=None,
            attn_mask_type=AttnMaskType.causal,
            attention_mask=None,
            position_ids=None,
            packed_seq_params=None,
        )
        none = {"mask": None, "varlen_starts": None, "varlen_ends": None, "key_positions": None}
        return positions(ids, 3, CPU), mask.exp(), *bounds(sq=3, skv=3, device=CPU, **none)

    ids = torch.arange(3)[None]
    compiled = torch.compile(step, fullgraph=True, backend="eager")(ids)

    assert all(torch.equal(one, other) for one, other in zip(compiled, step(ids), strict=True))


def test_the_witnesses_agree_and_the_self_tests_notice_the_seams(dsa_tree: Path) -> None:
    gates = Gates(dsa_tree)
    for part, module in gates.modules.items():
        assert part.witness is not None
        assert part.witness(module).broken, part.target
        assert part.self_test(module).broken, part.target
        undo = install(part, gates.shapes[part], module)
        assert not part.self_test(module).broken, part.target
        undo()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("query_pos[:, None]", "query_pos[:, None] + 1"),
        ("ends = seen.sum(dim=-1, dtype=torch.int32)", "ends = seen.sum(dim=-1, dtype=torch.int32) - 1"),
        ("(starts, queries + 1, key_pos)", "(starts, queries, key_pos)"),
    ],
)
def test_the_witness_rejects_a_builder_of_other_masks(old: str, new: str) -> None:
    tree = DirectoryTree(JUNE)
    text = text_of(tree, MASKING.target.module)
    assert text.count(old) == 1
    module = module_of(EditedTree(tree, MASKING.target.module, text.replace(old, new)), MASKING.target.module)

    assert MASKING.witness is not None
    assert not MASKING.witness(module).broken


def test_a_module_with_the_length_check_alone_passes_witness_and_self_test(wheel: Callable[[str, str], Path]) -> None:
    module: ModuleType = module_of(ArchiveTree(wheel("megatron-core", "0.19.2")), DSA.target.module, feature.LENGTHS)
    assert DSA.witness is not None
    assert DSA.witness(module).broken
    undo = install(DSA, feature.READ_LENGTHS, module)
    assert not DSA.self_test(module).broken
    undo()
