"""Real MoE layers on ranks of sequence parallelism with the overlay: packed samples are balanced as those of a batch.

What is measured is in `packed_shards.py`, in a process of its own for each release, which forks ranks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packed_shards import RANKS, WIDTH
from placed_seams import overlays_out, placed
from places import SUPPORT
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.seq_aux_loss_packed import IN_THE_SHARD
from megacpp_overlays.overlays.seq_aux_loss_packed import PARTS

pytestmark = pytest.mark.upstream

OLDER, NEWEST = "0.19.0", "0.19.2"
OF_LOSS, OF_LAYER = PARTS
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=[OLDER, NEWEST])
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """What a release does with the overlay and without it, by ranks."""
    others = {"MEGACPP_OVERLAY_MASKED_AUX_LOSS_TOKENS": "off"}  # pack 41 changes a batch under a mask, too
    answer = megatron_says(request.param, SUPPORT / "packed_shards.py", **others)
    assert answer["decisions"] == ["active", "active"]
    assert set(answer["found"]) == {str(each) for each in RANKS}
    return answer["found"]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far two losses and their gradients are from each other, relative to the greater values."""
    found = [torch.tensor([each["loss"], *each["gradient"]], dtype=torch.float64) for each in (one, other)]
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


def test_upstream_balances_several_samples_as_one(measured: Any) -> None:
    for ranks in measured.values():
        for way, packed in ranks["off"]["packed"].items():
            is_one = way.startswith("1")
            assert (apart(packed, ranks["off"]["batch"][way]) < ROUNDING) == is_one, way


def test_packed_samples_are_balanced_as_those_of_a_batch(measured: Any) -> None:
    for ranks in measured.values():
        assert len(ranks["on"]["packed"]) == 9
        for way, packed in ranks["on"]["packed"].items():
            assert apart(packed, ranks["on"]["batch"][way]) < ROUNDING, way
            assert max(map(abs, packed["gradient"])) > 0.01, way


def test_whatever_is_no_packed_shard_of_several_samples_keeps_upstream_s_bits(measured: Any) -> None:
    for ranks in measured.values():
        assert ranks["on"]["batch"] == ranks["off"]["batch"]
        for way in ("1, plain",):
            assert ranks["on"]["packed"][way] == ranks["off"]["packed"][way]
        for way in ("without gradients", "not trained"):
            assert ranks["on"][way] == ranks["off"][way]
            assert ranks["on"][way]["loss"] == 0


def test_outputs_of_the_layer_do_not_change(measured: Any) -> None:
    for ranks in measured.values():
        for way, packed in ranks["on"]["packed"].items():
            if "output" in packed:
                assert packed["output"] == pytest.approx(ranks["off"]["packed"][way]["output"], abs=1e-6), way


def test_batches_that_a_recomputation_could_not_tell_apart_end_in_an_error(measured: Any) -> None:
    said = measured[str(RANKS[0])]["on"]["one size, other samples"]

    assert said.pop("the same again") == ""
    assert len(said) == 3
    for each in said.values():
        assert "could not tell the two apart" in each
        assert "MEGACPP_OVERLAY_SEQ_AUX_LOSS_PACKED=off" in each
    assert set(measured[str(RANKS[0])]["off"]["one size, other samples"].values()) == {""}


# In this process


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Upstream as it is, without any overlay."""
    found = {each.target.module: upstream_module(each.target.module) for each in PARTS}
    with overlays_out():
        yield found


@pytest.mark.parametrize("part", PARTS, ids=["router", "layer"])
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(part: Any, modules: dict[str, ModuleType]) -> None:
    module = modules[part.target.module]
    before = dict(vars(module))

    assert part.witness is not None
    assert part.witness(module).broken
    with placed(part, IN_THE_SHARD, module):
        assert not part.self_test(module).broken
        with torch.inference_mode():
            assert not part.self_test(module).broken
    assert part.self_test(module).broken
    assert dict(vars(module)) == before


class Listens:
    """Stands for a router whose loss has the other seam."""

    def _apply_seq_aux_loss(self) -> None: ...


class Deaf:
    """Stands for one that has not."""

    def _apply_seq_aux_loss(self) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def listening(modules: dict[str, ModuleType]) -> None:
    ((replacement,),) = OF_LOSS.replacements.values()
    Listens._apply_seq_aux_loss = replacement.make(  # type: ignore[method-assign]
        Listens._apply_seq_aux_loss, modules[OF_LOSS.target.module]
    )


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def layer(*, router: Any = None, ranks: int = 2, training: bool = True, moe: bool = True, **config: Any) -> Any:
    asked = {"sequence_parallel": True, "context_parallel_size": 1, "mlp_chunks_for_training": 1, **config}
    return SimpleNamespace(
        is_moe_layer=moe,
        training=training,
        config=SimpleNamespace(**asked),
        pg_collection=SimpleNamespace(tp=Group(ranks)),
        mlp=SimpleNamespace(router=Listens() if router is None else router),
    )


def unflattened(made: Any, rows: int = 2 * WIDTH, columns: int = 1, width: int | None = WIDTH) -> Any:
    """Return what a layer with the seam makes of rows: upstream's own answer is a word."""
    ((replacement,),) = OF_LAYER.replacements.values()
    seam = replacement.make(lambda *_: "upstream", ModuleType("layers"))
    return seam(made, torch.zeros(rows, columns, 1), None, SimpleNamespace(tokens_per_sample=width))


def test_a_shard_of_several_samples_is_left_as_it_is() -> None:
    states, mask, axis = unflattened(layer())

    assert states.shape == (2 * WIDTH, 1, 1)
    assert (mask, axis) == (None, None)
    assert unflattened(layer(cuda_graph_impl="full_iteration"))[2] is None


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"sequence_parallel": False}, {}),
        ({"ranks": 1}, {}),
        ({"moe": False}, {}),
        ({"training": False}, {}),
        ({"router": Deaf()}, {}),
        ({"context_parallel_size": 2}, {}),
        ({"mlp_chunks_for_training": 2}, {}),
        ({"cuda_graph_impl": "transformer_engine"}, {}),
        ({"cuda_graph_impl": "local"}, {}),
        ({}, {"width": None}),
        ({}, {"columns": 2}),
        ({}, {"rows": WIDTH // 2}),
        ({}, {"rows": WIDTH + 1}),
        ({"ranks": 3}, {"rows": 2 * WIDTH}),
    ],
    ids=[
        "no sequence parallelism",
        "one rank",
        "no experts",
        "not trained",
        "a router without the seam",
        "context parallelism",
        "in chunks",
        "graphs of Transformer Engine",
        "graphs of layers",
        "a row that does not say",
        "a batch",
        "one sample",
        "no whole samples",
        "ranks that a sample cannot be cut for",
    ],
)
def test_upstream_s_own_code_runs_for_anything_else(made: dict[str, Any], given: dict[str, Any]) -> None:
    assert unflattened(layer(**made), **given) == "upstream"


def test_a_router_that_is_made_from_the_one_with_the_seam_is_told() -> None:
    class Own(Listens):
        pass

    class Overrides(Listens):
        def _apply_seq_aux_loss(self) -> None: ...

    for each in (Own, Overrides):
        assert unflattened(layer(router=each())) != "upstream"


def test_what_was_told_is_forgotten_with_the_next_batch_of_its_size() -> None:
    seen: list[int] = []

    class Router(Listens):
        def get_aux_loss_coeff(self, name: str) -> float:
            assert name == "seq_aux_loss"
            return 0.5

    ((replacement,),) = OF_LOSS.replacements.values()
    loss = replacement.make(
        lambda _self, _probs, scores, chosen, length, samples, **_: seen.append((length, samples, *scores.shape)),
        ModuleType("routers"),
    )
    router, rows = Router(), torch.ones(2 * WIDTH, 3)
    made = layer(router=router)

    def balanced() -> Any:
        loss(router, rows, rows, rows > 0, 2 * WIDTH, 1, with_padding_mask=False)
        return seen[-1]

    unflattened(made)
    assert balanced() == (WIDTH // 2, 4, WIDTH // 2, 4 * 3)
    unflattened(made, width=None)
    assert balanced() == (2 * WIDTH, 1, 2 * WIDTH, 3)
    unflattened(made, width=2 * WIDTH)
    assert balanced() == (WIDTH, 2, WIDTH, 2 * 3)
    assert pickle.loads(pickle.dumps(copy.deepcopy(vars(router)))) == {}  # nothing is left on what upstream saves


def test_a_router_without_that_loss_sums_nothing() -> None:
    seen: list[Any] = []
    ((replacement,),) = OF_LOSS.replacements.values()
    loss = replacement.make(lambda *given, **_: seen.append(given), ModuleType("routers"))

    class Router(Listens):
        def get_aux_loss_coeff(self, _name: str) -> float:
            return 0

    router, rows = Router(), torch.ones(2 * WIDTH, 3)
    unflattened(layer(router=router))
    loss(router, rows, rows, rows, 2 * WIDTH, 1)

    assert seen == [(router, rows, rows, rows, 2 * WIDTH, 1)]
