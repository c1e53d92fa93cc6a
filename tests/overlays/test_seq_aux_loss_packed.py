"""Real MoE layers on ranks of sequence parallelism with the overlay: packed samples are balanced as those of a batch.

The measurements are in `packed_shards.py`, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packed_shards import RANKS, WIDTH
from placed_seams import assert_witness_and_self_test, overlays_out
from places import SUPPORT
from releases import newest, weekly
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.seq_aux_loss_packed import IN_THE_SHARD
from megacpp_overlays.overlays.seq_aux_loss_packed import PARTS

pytestmark = pytest.mark.upstream

OLDER, NEWEST = "0.19.0", newest()
OF_LOSS, OF_EXPERTS, OF_LAYER = PARTS
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=weekly(OLDER, NEWEST))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """Results of a release with the overlay and without it, by the number of ranks."""
    others = {"MEGACPP_OVERLAY_MASKED_AUX_LOSS_TOKENS": "off"}  # pack 41 changes a batch under a mask, too
    answer = megatron_says(request.param, SUPPORT / "packed_shards.py", **others)
    assert answer["decisions"] == ["active"] * 3
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
        assert len(ranks["on"]["packed"]) == 10
        for way, packed in ranks["on"]["packed"].items():
            assert apart(packed, ranks["on"]["batch"][way]) < ROUNDING, way
            assert max(map(abs, packed["gradient"])) > 0.01, way


def test_inputs_that_are_no_packed_shard_of_several_samples_keep_upstream_s_bits(measured: Any) -> None:
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


def test_a_direct_call_of_an_mlp_or_a_router_has_upstream_s_loss(measured: Any) -> None:
    """As `megatron.core.models.gpt.fine_grained_callables` does, with as many tokens as the layer had a moment ago."""
    for ranks in measured.values():
        for kind in ("plain", "recomputed"):
            assert ranks["on"][f"directly, {kind}"] == ranks["off"][f"directly, {kind}"]
            for learnt in ranks["on"][f"directly, {kind}"].values():
                assert learnt["loss"] > 0


# In this process


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Upstream as it is, without any overlay."""
    found = {each.target.module: upstream_module(each.target.module) for each in PARTS}
    with overlays_out():
        yield found


@pytest.mark.parametrize("part", PARTS, ids=["router", "experts", "layer"])
def test_the_witness_sees_the_defect_and_the_self_test_its_absence(part: Any, modules: dict[str, ModuleType]) -> None:
    assert_witness_and_self_test(part, modules[part.target.module], IN_THE_SHARD)


def seam(part: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a part's replacement of a method, made around another function."""
    made = {each.symbol.rpartition(".")[2]: each.make for each in part.replacements[IN_THE_SHARD]}[name]
    replacement: Callable[..., Any] = made(original, ModuleType("upstream"))
    return replacement


class Plain:
    """Stand-in for a router without the seam. Its loss returns the length, the samples and the shape of the scores."""

    coefficient = 0.5

    def get_aux_loss_coeff(self, name: str) -> float:
        assert name == "seq_aux_loss"
        return self.coefficient

    def _apply_seq_aux_loss(
        self, probs: Any, scores: Any, chosen: Any, length: int, samples: int, with_padding_mask: bool = False
    ) -> tuple[int, ...]:
        assert scores.shape == chosen.shape
        return length, samples, *scores.shape


class Router(Plain):
    """Stand-in for a router with the seam."""

    _apply_seq_aux_loss = seam(OF_LOSS, "_apply_seq_aux_loss", Plain._apply_seq_aux_loss)


class Experts:
    """Stand-in for an MoE layer with the seam."""

    moe_layer_recompute = False

    def __init__(self, router: Any) -> None:
        self.router = router

    def route(self, rows: Any) -> Any:
        tokens = rows.flatten(0, 1)
        return self.router._apply_seq_aux_loss(tokens, tokens, tokens > 0, *rows.shape[:2])

    def _plain_forward(self, rows: Any) -> Any:
        return self.route(rows)

    forward = seam(OF_EXPERTS, "forward", _plain_forward)


class RecomputingExperts(Experts):
    """Stand-in for an MoE layer that routes in the backward pass alone."""

    moe_layer_recompute = True

    def _plain_forward(self, rows: Any) -> Callable[[], Any]:
        return lambda: self.route(rows)

    forward = seam(OF_EXPERTS, "forward", _plain_forward)


class Group:
    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.own = ranks, rank

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own


def layer(
    *, experts: Any = None, ranks: int = 2, rank: int = 0, training: bool = True, moe: bool = True, **config: Any
) -> Any:
    asked = {"sequence_parallel": True, "context_parallel_size": 1, "mlp_chunks_for_training": 1, **config}
    return SimpleNamespace(
        is_moe_layer=moe,
        training=training,
        config=SimpleNamespace(**asked),
        pg_collection=SimpleNamespace(tp=Group(ranks, rank)),
        mlp=Experts(Router()) if experts is None else experts,
    )


def mlp_of(made: Any, rows: int = 2 * WIDTH, columns: int = 1, width: int | None = WIDTH, **given: Any) -> Any:
    """Return the result of the MLP of a layer with the seams, or a word where upstream's code gives rows an axis of samples."""

    def upstream(self: Any, states: Any, params: Any) -> Any:
        states, *_, samples = unflatten(self, states, None, params)
        if samples == "upstream":
            return samples
        return given.get("then", self.mlp.forward)(states)

    unflatten = seam(OF_LAYER, "_maybe_unflatten_for_moe", lambda _, states, *__: (states, None, "upstream"))
    forward_mlp = seam(OF_LAYER, "_forward_mlp", upstream)
    states = given.get("states", torch.ones(rows, columns, 3))
    return forward_mlp(made, states, SimpleNamespace(tokens_per_sample=width))


FOUR_SAMPLES, AS_ONE = (WIDTH // 2, 4, WIDTH // 2, 4 * 3), (2 * WIDTH, 1, 2 * WIDTH, 3)


def test_a_shard_of_several_samples_is_balanced_by_sample() -> None:
    assert mlp_of(layer()) == FOUR_SAMPLES
    assert mlp_of(layer(cuda_graph_impl="full_iteration")) == FOUR_SAMPLES
    assert mlp_of(layer(), width=2 * WIDTH) == (WIDTH, 2, WIDTH, 2 * 3)
    for policy, capacity in (("probs", 1.0), ("position", None)):
        made = layer(moe_token_drop_policy=policy, moe_expert_capacity_factor=capacity)
        assert mlp_of(made) == FOUR_SAMPLES, policy


class Sums(Plain):
    """Stand-in for a router with the seam whose loss returns the scores that it balances."""

    _apply_seq_aux_loss = seam(OF_LOSS, "_apply_seq_aux_loss", lambda _, probs, scores, *others: scores)


def test_parts_of_a_sample_on_ranks_add_up_to_the_sample() -> None:
    """Three samples on two ranks: each has one of its own, and half of the one between."""
    tokens = torch.arange(3 * WIDTH * 3, dtype=torch.float64).view(3 * WIDTH, 1, 3)
    found = [
        mlp_of(layer(experts=Experts(Sums()), rank=rank), states=own).sum(dim=0).view(3, 3)
        for rank, own in enumerate(tokens.chunk(2))
    ]

    assert (found[0] + found[1]).equal(tokens.view(3, WIDTH, 3).sum(dim=1))
    assert not found[0][2].any()
    assert not found[1][0].any()


class OwnLoss(Router):
    def _apply_seq_aux_loss(self, *_: Any) -> None: ...


class HandsOn(Router):
    def _apply_seq_aux_loss(self, *given: Any) -> Any:
        return super()._apply_seq_aux_loss(*given)


class HandsOnByName(Router):
    def _apply_seq_aux_loss(self, *given: Any) -> Any:
        return Router._apply_seq_aux_loss(self, *given)


class OwnForward(RecomputingExperts):
    def forward(self, rows: Any) -> Any:
        return lambda: self.route(rows)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"sequence_parallel": False}, {}),
        ({"ranks": 1}, {}),
        ({"moe": False}, {}),
        ({"training": False}, {}),
        ({"experts": Experts(Plain())}, {}),
        ({"experts": Experts(OwnLoss())}, {}),
        ({"experts": OwnForward(Router())}, {}),
        ({"experts": object()}, {}),
        ({"context_parallel_size": 2}, {}),
        ({"mlp_chunks_for_training": 2}, {}),
        ({"cuda_graph_impl": "transformer_engine"}, {}),
        ({"cuda_graph_impl": "local"}, {}),
        ({"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}, {}),
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
        "a router with a loss of its own",
        "a recomputation of its own",
        "no router",
        "context parallelism",
        "in chunks",
        "graphs of Transformer Engine",
        "graphs of layers",
        "tokens are dropped by position",
        "a row that does not say",
        "a batch",
        "one sample",
        "no whole samples",
        "ranks that a sample cannot be cut for",
    ],
)
def test_upstream_s_own_code_runs_for_anything_else(made: dict[str, Any], given: dict[str, Any]) -> None:
    assert mlp_of(layer(**made), **given) == "upstream"


@pytest.mark.parametrize("router", [HandsOn(), HandsOnByName(), type("Own", (Router,), {})()])
def test_a_subclass_that_hands_on_to_the_loss_with_the_seam_balances_by_sample(router: Any) -> None:
    assert mlp_of(layer(experts=Experts(router))) == FOUR_SAMPLES


def test_the_samples_of_a_layer_end_with_its_call() -> None:
    made = layer()
    assert mlp_of(made) == FOUR_SAMPLES

    assert made.mlp.forward(torch.ones(2 * WIDTH, 1, 3)) == AS_ONE
    assert made.mlp.route(torch.ones(2 * WIDTH, 1, 3)) == AS_ONE
    # nothing is left on the router that upstream saves
    assert pickle.loads(pickle.dumps(copy.deepcopy(vars(made.mlp.router)))) == {}


def test_the_samples_of_a_layer_end_with_an_exception() -> None:
    made = layer()

    def fail(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mlp_of(made, then=fail)

    assert made.mlp.route(torch.ones(2 * WIDTH, 1, 3)) == AS_ONE


def test_the_samples_of_a_layer_belong_to_its_thread_and_its_rows() -> None:
    made = layer()
    rows = torch.ones(2 * WIDTH, 1, 3)

    def ask_elsewhere(states: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            (in_a_thread,) = other.map(made.mlp.forward, [rows])
        return in_a_thread, made.mlp.forward(rows[1:]), Experts(Router()).forward(rows), made.mlp.forward(states)

    assert mlp_of(made, then=ask_elsewhere) == (AS_ONE, (2 * WIDTH - 1, 1, 2 * WIDTH - 1, 3), AS_ONE, FOUR_SAMPLES)


def test_each_recomputation_has_the_samples_of_its_own_microbatch() -> None:
    made = layer(experts=RecomputingExperts(Router()))
    four, two = mlp_of(made), mlp_of(made, width=2 * WIDTH)
    alone = made.mlp.forward(torch.ones(2 * WIDTH, 1, 3))

    with ThreadPoolExecutor(1) as backward:
        found = [backward.submit(each).result() for each in (alone, two, four, two)]

    assert found == [AS_ONE, (WIDTH, 2, WIDTH, 2 * 3), FOUR_SAMPLES, (WIDTH, 2, WIDTH, 2 * 3)]


def test_an_attribute_that_an_mlp_sets_on_itself_is_set_on_the_recomputed_one() -> None:
    class Counts(RecomputingExperts):
        def _plain_forward(self, rows: Any) -> Any:
            self.rows = len(rows)
            return self.missing_ones if hasattr(self, "missing_ones") else self.rows

        forward = seam(OF_EXPERTS, "forward", _plain_forward)

    made = layer(experts=Counts(Router()))

    assert mlp_of(made) == made.mlp.rows == 2 * WIDTH


def test_a_router_without_that_loss_sums_nothing() -> None:
    made = layer()
    made.mlp.router.coefficient = 0

    assert mlp_of(made) == AS_ONE
