"""Real layers with norms on tensor parallel ranks with the overlay: finalized gradients are those of one rank.

The measurements are in `summed_norms.py`, which runs in its own process for each release and forks ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_witness_and_self_test, placed, stock
from places import SUPPORT
from releases import newest, weekly

from megacpp_overlays.feature_probes.tp_norm_gradients import ATTENTION, BY_NAME, FUNCTION, TARGET
from megacpp_overlays.overlays.tp_norm_gradients import OVERLAY

pytestmark = pytest.mark.upstream

NEWEST = newest()
RANKS = {
    **dict.fromkeys(("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2"), ("2",)),
    NEWEST: ("2", "4"),
}
WITH_NETS = ("0.16.1", "0.17.1", "0.18.2", NEWEST)
ROUNDING = 1e-5
"""Relative, of the largest value, in fp32."""
QUERIES, KEYS, OUTPUTS = "q_layernorm.weight", "kv_layernorm.weight", "out_norm.weight"


@pytest.fixture(scope="module", params=weekly(*RANKS))
def measured(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    megatron_says: Callable[..., Any],
    grid_size: str,
) -> tuple[str, Any]:
    """A release, and its results with the overlay and without it. Only the full tests use four ranks."""
    version, folder = request.param, tmp_path_factory.mktemp("ranks")
    numbers = RANKS[version] if grid_size == "all" else RANKS[version][:1]
    return version, megatron_says(version, SUPPORT / "summed_norms.py", folder, *numbers)


def each_way(found: Any) -> Iterator[tuple[str, int, list[Any]]]:
    """Yield each way with the number of ranks and with the results of all ranks."""
    for ranks in found.values():
        for name in ranks[0]:
            yield name, len(ranks), [each[name] for each in ranks]


def norms(found: Any) -> dict[str, Any]:
    return {name: each for name, each in found.items() if name.endswith(".weight")}


def is_wrong(name: str) -> bool:
    """Return whether upstream is wrong in a way: those without sequence parallelism, except norms of heads and averaged ones."""
    return not ("sequence" in name or "heads" in name or "averaged" in name)


def test_upstream_s_gradient_of_latent_queries_norms_is_as_many_times_too_large_as_there_are_ranks(
    measured: tuple[str, Any],
) -> None:
    _, found = measured

    for name, count, ranks in each_way(found["off"]):
        if name.startswith("latent") and is_wrong(name):
            assert [each[QUERIES]["times"] for each in ranks] == [pytest.approx(count)] * count, name
        for each in ranks:
            assert KEYS not in each or each[KEYS]["apart"] < ROUNDING, name


def test_upstream_s_delta_nets_learn_output_norms_from_the_heads_of_a_rank_and_drift_apart(
    measured: tuple[str, Any],
) -> None:
    version, found = measured
    ways = [way for way in each_way(found["off"]) if way[0].startswith("outputs")]

    assert bool(ways) == (version in WITH_NETS)
    for name, _, ranks in ways:
        if is_wrong(name):
            assert sum(each[OUTPUTS]["times"] for each in ranks) == pytest.approx(1), name
            assert min(each[OUTPUTS]["apart"] for each in ranks) > 0.1, name
            assert (max(each["drift"] for each in ranks) > 0.01) == ("main_grad" not in name), name


def test_every_norm_has_the_gradient_of_one_rank_and_replicas_stay_the_same(measured: tuple[str, Any]) -> None:
    _, found = measured

    assert found["decision"] == "active", found["reason"]
    for name, _, ranks in each_way(found["on"]):
        for each in ranks:
            assert max(norm["apart"] for norm in norms(each).values()) < ROUNDING, name
            assert each["drift"] == 0.0, name


def test_all_else_and_all_right_ways_are_upstream_s_bit_for_bit(measured: tuple[str, Any]) -> None:
    """Weights of latent attention learn otherwise for their rotary keys without the overlay of pack 25, which is not asked here."""
    _, found = measured

    for (name, _, with_it), (same, _, alone) in zip(each_way(found["on"]), each_way(found["off"]), strict=True):
        assert name == same
        assert [each["one rank"] for each in with_it] == [each["one rank"] for each in alone], name
        for ours, theirs in zip(with_it, alone, strict=True):
            if not name.startswith("latent"):
                assert ours["others"] == theirs["others"], name
                assert (ours["all"] == theirs["all"]) == (not is_wrong(name)), name
            assert (norms(ours) == norms(theirs)) == (not is_wrong(name)), name


# In this process


module = stock(TARGET.module)


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(module: ModuleType) -> None:
    assert_witness_and_self_test(OVERLAY, module, BY_NAME)


class Attention(torch.nn.Module):
    """An attention with the name of Megatron's, which third-party subclasses may change."""

    __module__ = ATTENTION
    __qualname__ = "MLASelfAttention"

    def __init__(self) -> None:
        super().__init__()
        self.q_layernorm = torch.nn.LayerNorm(2)
        self.config = SimpleNamespace(sequence_parallel=False)

    def get_query_key_value_tensors(self) -> None: ...


class RenamedAttention(Attention):
    """A subclass that changes no method."""


class HandsOn(RenamedAttention):
    """A subclass whose method calls the base's."""

    def get_query_key_value_tensors(self) -> None:
        return super().get_query_key_value_tensors()


class Own(Attention):
    """A subclass that applies its norms in its own way."""

    def get_query_key_value_tensors(self) -> None: ...


class WithoutNorm(Attention):
    """A class of queries of full rank."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_layernorm


def shown(model: Any, **config: Any) -> tuple[Any, list[str]]:
    """Return the chunk that upstream gets from the seam, and the names of the chunk's parameters."""
    seen: list[Any] = []

    def upstream(model: Any, config: Any, *more: Any) -> Any:
        seen.extend((model, config, more))
        return "upstream's result"

    (replacement,) = OVERLAY.replacements[BY_NAME]
    utils = importlib.import_module("megatron.core.utils")
    reduce = replacement.make(upstream, SimpleNamespace(get_attr_wrapped_model=utils.get_attr_wrapped_model))
    settings = SimpleNamespace(**{"qk_layernorm": True, "sequence_parallel": False, "other": 3, **config})
    assert reduce([model], settings, "group") == "upstream's result"
    (chunk,), given, more = seen
    assert more == ("group",)
    assert (given.other, given.sequence_parallel) == (3, settings.sequence_parallel)
    return chunk, [name for name, _ in chunk.named_parameters()]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Attention, [""] * 2),
        (RenamedAttention, [""] * 2),
        (HandsOn, [""] * 2),
        (Own, ["q_layernorm"] * 2),
        (WithoutNorm, []),
    ],
)
def test_only_an_attention_that_makes_its_queries_as_it_was_read_has_whole_gradients(
    kind: Any, names: list[str]
) -> None:
    assert shown(torch.nn.Sequential(kind()))[1] == names


def test_with_sequence_parallelism_latent_queries_are_summed() -> None:
    attention = Attention()
    attention.config.sequence_parallel = True

    assert shown(attention)[1] == ["q_layernorm"] * 2


def test_without_qk_layernorm_names_do_not_count() -> None:
    assert shown(Own(), qk_layernorm=False)[1] == [""] * 2


def test_a_chunk_keeps_its_attributes_and_its_parameters_in_their_order() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Attention())
    model.ddp_config = object()

    chunk, _ = shown(model)

    assert chunk.ddp_config is model.ddp_config
    assert [id(each) for _, each in chunk.named_parameters()] == [id(each) for each in model.parameters()]


def test_a_chunk_may_be_wrapped_as_upstream_wraps_models() -> None:
    wrapped = SimpleNamespace(module=torch.nn.Sequential(Attention()), ddp_config=None)

    assert shown(wrapped)[1] == [""] * 2


def test_upstream_s_alias_for_its_own_tests_is_left_alone(module: ModuleType) -> None:
    with placed(OVERLAY, BY_NAME, module):
        assert module._allreduce_layernorm_grads is not getattr(module, FUNCTION)
