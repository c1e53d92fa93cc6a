"""Sharded optimizer state of a model that mixes fp32 and half-precision parameters.

The constructors of both optimizers take CUDA tensors only. Here an instance is built without its constructor, around a
real torch optimizer and Megatron's own sharding helpers; the whole way is in tests/gpu/test_float16_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_same_bits, assert_self_test, overlays_out, placed
from places import ROOT
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes.float16_distributed_order import STALE_ORDER
from megacpp_overlays.feature_probes.float16_optimizer_state_ids import FLOAT16_IDS
from megacpp_overlays.overlays import float16_distributed_order as distributed_order
from megacpp_overlays.overlays import float16_optimizer_state_ids as state_ids
from megacpp_overlays.repro import Neighbour, neighbour

OVERLAYS = (state_ids.OVERLAY, distributed_order.OVERLAY)
NEIGHBOURS = [
    each for each in neighbour.load(ROOT / "packs/16-float16-fp32-exemption") if each.overlay == state_ids.OVERLAY.id
]
B, F = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def megatron() -> Iterator[SimpleNamespace]:
    """Both targets of the installed release, without any overlay."""
    modules = [upstream_module(each.target.module) for each in OVERLAYS]
    with overlays_out():
        yield SimpleNamespace(optimizer=modules[0], distributed=modules[1])


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the rank, because Megatron asks which rank it logs for."""
    monkeypatch.setenv("RANK", "0")


class TrainedOptimizer:
    """Parameters in groups, a real AdamW after one step, and Megatron's optimizer around it."""

    def __init__(self, megatron: SimpleNamespace, *groups: list[torch.dtype], seed: int = 0, idle: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model: dict[str, torch.nn.Parameter] = {}
        float16: list[list[Any]] = []
        copies: list[list[Any]] = []
        inner: list[list[Any]] = []
        for number, group in enumerate(groups):
            own = [torch.nn.Parameter(torch.randn(3, generator=generator).to(dtype)) for dtype in group]
            self.model |= {f"group{number}.{place}": parameter for place, parameter in enumerate(own)}
            inner.append([each.detach().clone().float() if each.dtype is B else each for each in own])
            float16.append([each for each in own if each.dtype is B])
            copies.append([copy for copy, each in zip(inner[-1], own, strict=True) if each.dtype is B])
        names = ("lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")
        settings = [{"wd_mult": float(number), **dict.fromkeys(names, True)} for number in range(len(groups))]
        self.inner = torch.optim.AdamW(
            [{"params": group, **setting} for group, setting in zip(inner, settings, strict=True)], lr=0.1
        )
        flat = [parameter for group in inner for parameter in group]
        for parameter in flat[: len(flat) - idle]:
            parameter.grad = torch.randn(3, generator=generator)
        self.inner.step()
        self.optimizer = object.__new__(megatron.optimizer.Float16OptimizerWithFloat16Params)
        vars(self.optimizer).update(
            optimizer=self.inner,
            config=SimpleNamespace(fp16=False, bf16=True),
            grad_scaler=None,
            init_state_fn=lambda *_: None,
            is_stub_optimizer=False,
            float16_groups=float16,
            fp32_from_float16_groups=copies,
            fp32_from_fp32_groups=[[each for each in group if each.is_leaf and each.requires_grad] for group in inner],
        )

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        model = {name: ShardedTensor.from_rank_offsets(name, parameter) for name, parameter in self.model.items()}
        state: dict[str, Any] = self.optimizer.sharded_state_dict(model)
        return state

    @property
    def moments(self) -> list[torch.Tensor]:
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        return [self.inner.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]


def entries(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return (value for value in nested_values(state) if hasattr(value, "key"))


def moments_by_name(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {entry.key: entry.data for entry in entries(state["optimizer"]["state"])}


MIXED = [[[B, F, B]], [[F, B]], [[B, B, F], [F, B]], [[F, F], [B, F]], [[B], [F]], [[F]]]


@pytest.mark.parametrize("groups", MIXED, ids=str)
def test_without_the_overlay_mixed_state_cannot_be_saved(megatron: SimpleNamespace, groups: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        TrainedOptimizer(megatron, *groups).sharded()


@pytest.mark.parametrize("groups", MIXED, ids=str)
def test_every_state_is_saved_under_the_name_of_its_parameter(megatron: SimpleNamespace, groups: Any) -> None:
    trained = TrainedOptimizer(megatron, *groups)
    with placed(state_ids.OVERLAY, FLOAT16_IDS, megatron.optimizer):
        state = trained.sharded()

    saved = moments_by_name(state)
    inner = [parameter for group in trained.inner.param_groups for parameter in group["params"]]
    for name, parameter in zip(trained.model, inner, strict=True):
        assert saved[f"optimizer.state.exp_avg.{name}"] is trained.inner.state[parameter]["exp_avg"]
    assert len(saved) == 2 * len(inner)
    copies = {entry.key: entry.data for entry in entries(state["fp32_from_fp16_params"])}
    for name, parameter in zip(trained.model, inner, strict=True):
        if trained.model[name].dtype is B:
            assert copies[f"optimizer.state.fp32_param.{name}"] is parameter
    assert [len(group) for group in state["fp32_from_fp16_params"]] == [max(group.count(B), 1) for group in groups]


@pytest.mark.parametrize("groups", MIXED, ids=str)
def test_state_comes_back_through_names_alone(megatron: SimpleNamespace, groups: Any) -> None:
    saved, fresh = TrainedOptimizer(megatron, *groups, seed=1), TrainedOptimizer(megatron, *groups, seed=2)
    assert not torch.equal(saved.moments[0], fresh.moments[0])
    with placed(state_ids.OVERLAY, FLOAT16_IDS, megatron.optimizer):
        stored = {entry.key: entry.data.detach().clone() for entry in entries(saved.sharded())}
        loaded = read_back(fresh.sharded(), stored)
    fresh.optimizer.load_state_dict(loaded)

    assert all(torch.equal(one, other) for one, other in zip(saved.moments, fresh.moments, strict=True))
    for one, other in zip(
        saved.optimizer.fp32_from_float16_groups, fresh.optimizer.fp32_from_float16_groups, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("groups", [[[B], [F]], [[F, F], [B, F]]], ids=str)
def test_of_a_native_parameter_no_copy_is_written(megatron: SimpleNamespace, groups: Any) -> None:
    """Megatron refuses a checkpoint with the copy of one layer under a name that stacked layers share."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    trained = TrainedOptimizer(megatron, *groups)
    with placed(state_ids.OVERLAY, FLOAT16_IDS, megatron.optimizer):
        copies = list(entries(trained.sharded()["fp32_from_fp16_params"]))

    written = sorted(each.key for each in copies if is_main_replica(each.replica_id))
    halves = sorted(name for name, parameter in trained.model.items() if parameter.dtype is B)
    assert written == [f"optimizer.state.fp32_param.{name}" for name in halves]  # and each once


def read_back(state: Any, stored: dict[str, torch.Tensor]) -> Any:
    """Fill a sharded state from storage by name, as a checkpoint does."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(state, dict):
        return {key: read_back(value, stored) for key, value in state.items()}
    if isinstance(state, list):
        return [read_back(value, stored) for value in state]
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    return stored[state.key] if hasattr(state, "key") else state


def test_a_frozen_parameter_in_a_group_shifts_nothing(megatron: SimpleNamespace) -> None:
    trained = TrainedOptimizer(megatron, [B, B])
    frozen = torch.nn.Parameter(torch.zeros(3, dtype=B), requires_grad=False)
    trained.inner.param_groups[0]["params"].insert(0, frozen)
    trained.model["frozen"] = frozen

    with placed(state_ids.OVERLAY, FLOAT16_IDS, megatron.optimizer):
        state = trained.sharded()

    first = trained.optimizer.fp32_from_float16_groups[0][0]
    assert moments_by_name(state)["optimizer.state.exp_avg.group0.0"] is trained.inner.state[first]["exp_avg"]
    keys = [entry.key.rpartition("fp32_param.")[2] for entry in state["fp32_from_fp16_params"][0]]
    assert keys == ["group0.0", "group0.1"]


@pytest.mark.parametrize("each", NEIGHBOURS, ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(
    each: Neighbour, megatron: SimpleNamespace
) -> None:
    assert_same_bits(each, state_ids.OVERLAY, megatron.optimizer, FLOAT16_IDS)


def test_groups_are_back_even_when_upstream_fails(megatron: SimpleNamespace) -> None:
    trained = TrainedOptimizer(megatron, [B, F])
    groups = trained.optimizer.float16_groups, trained.optimizer.fp32_from_float16_groups
    del trained.model["group0.1"]

    with placed(state_ids.OVERLAY, FLOAT16_IDS, megatron.optimizer), pytest.raises(KeyError):
        trained.sharded()

    assert trained.optimizer.float16_groups is groups[0]
    assert trained.optimizer.fp32_from_float16_groups is groups[1]


def test_each_self_test_sees_its_defect_and_its_absence(megatron: SimpleNamespace) -> None:
    assert_self_test(state_ids.OVERLAY, megatron.optimizer, FLOAT16_IDS)
    assert_self_test(distributed_order.OVERLAY, megatron.distributed, STALE_ORDER)


# The distributed optimizer


class OnCuda(torch.nn.Parameter):
    """A CPU parameter that names its type like a CUDA one, which is all that the group builder asks."""

    def type(self) -> str:  # type: ignore[override]
        return {B: "torch.cuda.BFloat16Tensor", F: "torch.cuda.FloatTensor"}[self.dtype]


def test_positions_are_those_of_the_installed_groups(megatron: SimpleNamespace) -> None:
    """Two grad buffers, bf16 first as in a model that starts with an embedding, and one optimizer group."""
    cls, span = megatron.distributed.DistributedOptimizer, megatron.distributed.Range
    parameters = [OnCuda(torch.zeros(size, dtype=dtype)) for size, dtype in ((8, B), (4, F), (6, B), (5, F))]
    buffers = []
    for dtype in (B, F):
        start, ranges = 0, {}
        for each in reversed(parameters):
            if each.dtype is dtype:
                where = span(start, start + each.numel())
                names = ("gbuf_world", "gbuf_local", "gbuf_world_in_bucket")
                ranges[each] = dict.fromkeys(names, where) | {"param": span(0, each.numel())}
                start = where.end
        buffers.append({(dtype, F): [{"param_map": ranges}]})
    groups = [{"params": list(parameters)}]

    def build(self: Any) -> None:
        self.model_param_group_index_map, ranges = cls._build_optimizer_group_ranges(groups, buffers)
        places = cls._build_model_param_gbuf_map(buffers)
        config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe=None)
        built = cls._build_model_and_main_param_groups(buffers, places, ranges, config)
        self.model_float16_groups, self.model_fp32_groups = built[:2]

    def sizes(optimizer: Any) -> list[int]:
        positions = [optimizer.model_param_group_index_map[each] for each in parameters]
        return [groups[group]["params"][place].numel() for group, place in positions]

    optimizer = object.__new__(cls)
    build(optimizer)
    assert sizes(optimizer) != [8, 4, 6, 5]

    groups[0]["params"] = list(parameters)
    constructor, _ = distributed_order.OVERLAY.replacements[STALE_ORDER]
    constructor.make(build, megatron.distributed)(optimizer)
    assert sizes(optimizer) == [8, 4, 6, 5]


def test_an_optimizer_without_groups_is_left_alone(megatron: SimpleNamespace) -> None:
    """A rank without parameters, and Megatron-FSDP: upstream's constructor returns early."""
    constructor, _ = distributed_order.OVERLAY.replacements[STALE_ORDER]
    optimizer = SimpleNamespace()

    constructor.make(lambda self, stub: setattr(self, "is_stub_optimizer", stub), megatron.distributed)(optimizer, True)

    assert vars(optimizer) == {"is_stub_optimizer": True}
