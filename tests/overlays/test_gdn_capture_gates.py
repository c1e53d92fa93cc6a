"""The packed lengths of a gated delta net: checked by upstream outside a capture, held to the warm-up inside one."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dsa_source import install
from tensor_writes import COPIES, WRITES, Copy, Write

from megacpp_overlays.feature_probes.gdn_capture_gates import READ_LENGTHS
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.gdn_capture_gates import PARTS
from megacpp_overlays.runtime import graph_capture
from megacpp_overlays.source.file_trees import ArchiveTree

Wheel = Callable[[str, str], Path]
IN_ONE_FILE, IN_A_BASE_CLASS = PARTS
ROLES = ("cu_seqlens_q", "cu_seqlens_kv")
LAYOUTS = [("0.18.2", IN_ONE_FILE), ("0.19.2", IN_A_BASE_CLASS)]


def module_of(tree: ArchiveTree, part: Overlay) -> ModuleType:
    """Return a module with the class, and of the class nothing but the method."""
    source = tree.module(part.target.module)
    assert source is not None
    method = source.function(part.target.symbol)
    assert method is not None
    class_name = part.target.symbol.partition(".")[0]
    code = ast.parse(f"from __future__ import annotations\nclass {class_name}: ...")
    code.body[1].body = [method]  # type: ignore[attr-defined]
    module = ModuleType("gated_delta_net_copy")
    exec(compile(ast.fix_missing_locations(code), source.path, "exec"), vars(module))
    return module


class Resolver:
    """The method of one release, as its forward pass calls it."""

    def __init__(self, tree: ArchiveTree, part: Overlay) -> None:
        self.module, self.part = module_of(tree, part), part

    def __call__(self, lengths: Any, role: str = ROLES[0], total: int = 6, cp_size: int = 1, padded: Any = None) -> Any:
        class_name, name = self.part.target.symbol.split(".")
        instance = object.__new__(getattr(self.module, class_name))
        return getattr(instance, name)(padded, lengths, total, role, cp_size=cp_size)


@pytest.fixture(params=LAYOUTS, ids=[version for version, _ in LAYOUTS])
def upstream(request: pytest.FixtureRequest, wheel: Wheel) -> Resolver:
    version, part = request.param
    return Resolver(ArchiveTree(wheel("megatron-core", version)), part)


@pytest.fixture
def resolve(upstream: Resolver) -> Iterator[Resolver]:
    undo = install(upstream.part, READ_LENGTHS, upstream.module)
    yield upstream
    undo()


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def warmed_up(resolve: Resolver, tensor: torch.Tensor, **given_values: int) -> torch.Tensor:
    for role in ROLES:
        assert resolve(tensor, role, **given_values) is tensor
    return tensor


# Outside a capture


@pytest.mark.parametrize(
    ("values", "total", "cp_size"), [((0, 2, 6), 6, 2), ((0, 2, 6), 8, 1), ((0, 3, 6), 6, 2), ((0, 3, 6), 6, 1)]
)
def test_outside_a_capture_the_checks_are_upstreams(
    upstream: Resolver, values: tuple[int, ...], total: int, cp_size: int
) -> None:
    answers = []
    for patched in (False, True):
        undo = install(upstream.part, READ_LENGTHS, upstream.module) if patched else None
        given_lengths = lengths(*values)
        with graph_capture.host_reads() as read:
            try:
                said: Any = upstream(given_lengths, total=total, cp_size=cp_size) is given_lengths
            except ValueError as error:
                said = str(error)
        answers.append((said, read))
        if undo is not None:
            undo()
    assert answers[0] == answers[1]
    assert answers[0][1]


def test_padded_lengths_come_before_actual_ones(resolve: Resolver) -> None:
    padded = lengths(0, 4, 6)
    warmed_up(lambda tensor, role: resolve(lengths(0, 3, 5), role, padded=tensor), padded)  # type: ignore[arg-type]

    with graph_capture.rehearsal():
        assert resolve(lengths(0, 3, 5), padded=padded) is padded
        with pytest.raises(RuntimeError, match="warm-up"):
            resolve(lengths(0, 3, 5), padded=lengths(0, 4, 6))


# Inside a rehearsed capture


def test_lengths_that_passed_in_the_warm_up_pass_without_a_read(resolve: Resolver) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))

    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        found = [resolve(given_lengths, role) for role in ROLES]

    assert all(each is given_lengths for each in found)
    assert read == []


@pytest.mark.parametrize("change", [{"total": 8}, {"cp_size": 2}], ids=["other total", "other ranks"])
def test_lengths_pass_only_for_the_values_that_they_were_checked_for(resolve: Resolver, change: dict[str, int]) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))

    with graph_capture.rehearsal(), pytest.raises(RuntimeError, match="run a warm-up pass first"):
        resolve(given_lengths, **change)


def test_a_tensor_without_a_warm_up_is_refused(resolve: Resolver) -> None:
    warmed_up(resolve, lengths(0, 2, 6))

    with graph_capture.rehearsal(), pytest.raises(RuntimeError, match="did not pass before"):
        resolve(lengths(0, 2, 6))


def test_one_tensor_for_queries_and_another_for_keys_is_refused(resolve: Resolver) -> None:
    queries, keys = lengths(0, 2, 6), lengths(0, 2, 6)
    resolve(queries, ROLES[0])
    resolve(keys, ROLES[1])

    with graph_capture.rehearsal():
        for tensor, role in zip((queries, keys), ROLES, strict=True):
            with pytest.raises(RuntimeError, match="one tensor for both"):
                resolve(tensor, role)


def test_a_failed_check_is_not_remembered(resolve: Resolver) -> None:
    given_lengths = lengths(0, 3, 6)
    for role in ROLES:
        with pytest.raises(ValueError, match="divisible"):
            resolve(given_lengths, role, cp_size=2)

    with graph_capture.rehearsal(), pytest.raises(RuntimeError, match="did not pass"):
        resolve(given_lengths, cp_size=2)


class ComparisonRecorder(torch.overrides.TorchFunctionMode):
    """Keep weak references to the tensors that the assertion compares with: a captured graph reads their memory on every replay."""

    def __init__(self) -> None:
        self.memory: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.eq or func is torch.Tensor.__eq__:
            self.memory.append(weakref.ref(args[1]))
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_was_rewritten_with_other_lengths_is_refused_for_good(resolve: Resolver) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))
    given_lengths[1] = 3
    warmed_up(resolve, given_lengths)
    given_lengths[1] = 2
    warmed_up(resolve, given_lengths)

    with graph_capture.rehearsal(), graph_capture.host_reads() as read:
        for role in ROLES:
            with pytest.raises(RuntimeError, match="rewritten with other lengths"):
                resolve(given_lengths, role)
    assert read == []


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_other_lengths_are_noticed_however_they_were_written(resolve: Resolver, write: Write) -> None:
    passed_again, in_a_graph = warmed_up(resolve, lengths(0, 2, 6)), warmed_up(resolve, lengths(0, 2, 6))

    for each in (passed_again, in_a_graph):
        write(each, lengths(0, 3, 6))
    warmed_up(resolve, passed_again)
    write(passed_again, lengths(0, 2, 6))

    with graph_capture.rehearsal():
        with pytest.raises(RuntimeError, match="rewritten with other lengths"):
            resolve(passed_again)
        with pytest.raises(RuntimeError, match="other lengths than in the warm-up"):
            resolve(in_a_graph)


def test_more_documents_in_the_same_tensor_are_refused(resolve: Resolver) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))
    given_lengths.data = lengths(0, 2, 4, 6)

    with graph_capture.rehearsal(), pytest.raises(RuntimeError, match="rewritten with other lengths"):
        resolve(given_lengths)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_lengths_that_passed_has_not_passed(resolve: Resolver, make_copy: Copy) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))

    again = make_copy(given_lengths)

    assert (vars(given_lengths), vars(again)) == ({}, {})
    with graph_capture.rehearsal(), pytest.raises(RuntimeError, match="did not pass before"):
        resolve(again)


def test_the_same_lengths_written_again_pass(resolve: Resolver) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))
    given_lengths.copy_(lengths(0, 2, 6))
    warmed_up(resolve, given_lengths)

    with graph_capture.rehearsal():
        assert resolve(given_lengths) is given_lengths


def test_lengths_of_inference_mode_are_compared_each_time(resolve: Resolver) -> None:
    with torch.inference_mode():
        same, other = warmed_up(resolve, lengths(0, 2, 6)), warmed_up(resolve, lengths(0, 2, 6))
        other[1] = 3
        warmed_up(resolve, other)
        warmed_up(resolve, same)

        with graph_capture.rehearsal():
            assert resolve(same) is same
            with pytest.raises(RuntimeError, match="rewritten with other lengths"):
                resolve(other)


@pytest.mark.parametrize("rewritten", [(0, 2, 6), (0, 3, 6)], ids=["same lengths", "other lengths"])
def test_memory_that_a_graph_compares_with_lives_as_long_as_the_tensor(
    resolve: Resolver, rewritten: tuple[int, ...]
) -> None:
    given_lengths = warmed_up(resolve, lengths(0, 2, 6))
    with graph_capture.rehearsal(), ComparisonRecorder() as compared:
        resolve(given_lengths)
    assert len(compared.memory) == 1

    given_lengths.copy_(lengths(*rewritten))
    warmed_up(resolve, given_lengths)

    content = compared.memory[0]()
    assert content is not None
    assert content.tolist() == [0, 2, 6]


# Installing


def test_the_witness_agrees_and_the_self_test_notices_the_seam(upstream: Resolver) -> None:
    part, module = upstream.part, upstream.module
    assert part.witness is not None
    assert part.witness(module).broken
    assert part.self_test(module).broken
    undo = install(part, READ_LENGTHS, module)
    assert not part.self_test(module).broken
    undo()
