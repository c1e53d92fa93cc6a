"""Sharded optimizer state of a model that mixes fp32 and half-precision parameters.

The constructors of both optimizers take CUDA tensors only. Here an instance is built without its constructor, around a
real torch optimizer and Megatron's own sharding helpers; the whole way is in tests/gpu/test_float16_megatron.py.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from upstream_imports import upstream_module

import megacpp_overlays
from megacpp_overlays.feature_probes import float16_distributed_order, float16_optimizer_state_ids
from megacpp_overlays.loader import probing, seams
from megacpp_overlays.model import Finding, Overlay, Verdict
from megacpp_overlays.overlays import float16_distributed_order as distributed_order
from megacpp_overlays.overlays import float16_optimizer_state_ids as state_ids
from megacpp_overlays.source import forms
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource

PROBES = (float16_optimizer_state_ids, float16_distributed_order)
B, F = torch.bfloat16, torch.float32


class TextTree:
    """One module given as text."""

    def __init__(self, name: str, text: str) -> None:
        self.source = ModuleSource(name, "given.py", text)

    def module(self, name: str) -> ModuleSource | None:
        return self.source if name == self.source.name else None


def text_of(probe: ModuleType, wheel: Callable[[str, str], Path], version: str = "0.19.2") -> str:
    source = ArchiveTree(wheel("megatron-core", version)).module(probe.TARGET.module)
    assert source is not None
    return source.text


def examine(probe: ModuleType, text: str) -> Finding:
    return probing.examine(overlay_of(probe), TextTree(probe.TARGET.module, text))


def overlay_of(probe: ModuleType) -> Overlay:
    (overlay,) = (each.OVERLAY for each in (state_ids, distributed_order) if each.OVERLAY.target == probe.TARGET)
    return overlay


# Probes


@pytest.mark.parametrize("probe", PROBES, ids=["ids", "order"])
def test_what_is_not_there_is_absent(probe: ModuleType) -> None:
    assert probe.probe(TextTree("other", "")).verdict is Verdict.ABSENT
    assert examine(probe, "class Other: pass").verdict is Verdict.ABSENT


@pytest.mark.unmeasured
@pytest.mark.parametrize("probe", PROBES, ids=["ids", "order"])
@pytest.mark.parametrize("times", [0, 2], ids=["missing", "doubled"])
def test_a_statement_of_a_known_body_may_not_be(
    probe: ModuleType, times: int, wheel: Callable[[str, str], Path]
) -> None:
    """The last one stands for all: a body is compared by its digest, in which every statement counts."""
    text = text_of(probe, wheel)
    record = forms.record(overlay_of(probe).id, probe.TARGET.module)
    within = f"{probe.TARGET.module}:{probe.TARGET.symbol}."
    methods = [place.removeprefix(within) for place in record.places if place.startswith(within)]
    assert len(methods) >= 3
    for method in methods:
        syntax = ast.parse(text)
        body = function(syntax, probe.TARGET.symbol, method).body
        body[-1:] = [body[-1]] * times or [ast.Pass()]
        changed = ast.unparse(ast.fix_missing_locations(syntax))
        assert examine(probe, changed).verdict is Verdict.UNRECOGNISED, method


def function(syntax: ast.Module, class_name: str, method: str) -> ast.FunctionDef:
    cls = next(node for node in syntax.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method)


@pytest.mark.unmeasured
@pytest.mark.parametrize("probe", PROBES, ids=["ids", "order"])
@pytest.mark.parametrize(
    "edit",
    ["decorate", "parameter", "rename", "twice", "rebind", "patch", "setattr", "import", "star", "global", "except"],
)
def test_other_edits_are_not_recognised(probe: ModuleType, edit: str, wheel: Callable[[str, str], Path]) -> None:
    symbol = probe.TARGET.symbol
    syntax = ast.parse(text_of(probe, wheel))
    method = function(syntax, symbol, "__init__")
    cls = next(node for node in syntax.body if isinstance(node, ast.ClassDef) and node.name == symbol)
    match edit:
        case "decorate":
            method.decorator_list = [ast.Name("patched")]
        case "parameter":
            method.args.kwonlyargs, method.args.kw_defaults = [ast.arg("extra")], [None]
        case "rename":
            method.name = "__setup__"
        case "twice":
            cls.body.append(method)
        case "rebind":
            cls.body += ast.parse("__init__ = patched(__init__)").body
        case "patch":
            syntax.body += ast.parse(f"{symbol}.__init__ = patched").body
        case "setattr":
            syntax.body += ast.parse(f"setattr({symbol}, '__init__', patched)").body
        case "import":
            syntax.body += ast.parse(f"from elsewhere import {symbol}").body
        case "star":
            syntax.body += ast.parse("from elsewhere import *").body
        case "global":
            syntax.body += ast.parse(f"def swap():\n    global {symbol}\n    {symbol} = patched").body
        case "except":
            syntax.body += ast.parse(f"try: run()\nexcept Error as {symbol}: pass").body

    assert examine(probe, ast.unparse(ast.fix_missing_locations(syntax))).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("probe", PROBES, ids=["ids", "order"])
def test_layout_and_comments_do_not_matter(probe: ModuleType, wheel: Callable[[str, str], Path]) -> None:
    text = ast.unparse(ast.parse(text_of(probe, wheel)))  # loses every comment

    assert examine(probe, text).verdict is Verdict.BROKEN


def test_a_fingerprint_sees_signature_decorators_and_statements() -> None:
    def of(text: str) -> str:
        node = ast.parse(text).body[0]
        assert isinstance(node, ast.FunctionDef)
        return fingerprint(node)

    plain = of("def f(a):\n    return g(a)")
    assert of('def f(a):\n    """Say."""\n\n    # why\n    return g( a )') == plain
    others = ["def f(a, b=1):\n    return g(a)", "@h\ndef f(a):\n    return g(a)", "def f(a):\n    return g(a, 0)"]
    assert len({plain, *map(of, others)}) == 4


# Behaviour


@pytest.fixture(scope="module")
def megatron() -> Iterator[SimpleNamespace]:
    """Both targets of the installed release, as upstream made them."""
    overlays = (state_ids.OVERLAY, distributed_order.OVERLAY)
    optimizer, distributed = (upstream_module(overlay.target.module) for overlay in overlays)
    for overlay in overlays:
        megacpp_overlays.undo(overlay.id)
    yield SimpleNamespace(optimizer=optimizer, distributed=distributed)
    megacpp_overlays.arm()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asks which rank it logs for."""
    monkeypatch.setenv("RANK", "0")


@contextlib.contextmanager
def overlay_on(overlay: Overlay, module: ModuleType) -> Iterator[None]:
    """Put in the seams of an overlay's one released shape."""
    shape = next(iter(overlay.replacements))
    placed = []
    try:
        for replacement in overlay.replacements[shape]:
            owner, name = seams.resolve(module, replacement.symbol)
            make = replacement.make
            placed.append(seams.replace(owner, name, lambda f, make=make: make(f, module), overlay_id=overlay.id))
        yield
    finally:
        for seam in reversed(placed):
            seam.undo()


class Trained:
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
        Trained(megatron, *groups).sharded()


def test_without_the_overlay_idle_parameters_hide_that_names_are_swapped(megatron: SimpleNamespace) -> None:
    trained = Trained(megatron, [B, F, B], idle=1)

    saved = moments_by_name(trained.sharded())

    native = trained.inner.state[trained.model["group0.1"]]["exp_avg"]
    assert saved["optimizer.state.exp_avg.group0.2"] is native


@pytest.mark.parametrize("groups", MIXED, ids=str)
def test_every_state_is_saved_under_the_name_of_its_parameter(megatron: SimpleNamespace, groups: Any) -> None:
    trained = Trained(megatron, *groups)
    with overlay_on(state_ids.OVERLAY, megatron.optimizer):
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
    saved, fresh = Trained(megatron, *groups, seed=1), Trained(megatron, *groups, seed=2)
    assert not torch.equal(saved.moments[0], fresh.moments[0])
    with overlay_on(state_ids.OVERLAY, megatron.optimizer):
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

    trained = Trained(megatron, *groups)
    with overlay_on(state_ids.OVERLAY, megatron.optimizer):
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
    trained = Trained(megatron, [B, B])
    frozen = torch.nn.Parameter(torch.zeros(3, dtype=B), requires_grad=False)
    trained.inner.param_groups[0]["params"].insert(0, frozen)
    trained.model["frozen"] = frozen

    with overlay_on(state_ids.OVERLAY, megatron.optimizer):
        state = trained.sharded()

    first = trained.optimizer.fp32_from_float16_groups[0][0]
    assert moments_by_name(state)["optimizer.state.exp_avg.group0.0"] is trained.inner.state[first]["exp_avg"]
    keys = [entry.key.rpartition("fp32_param.")[2] for entry in state["fp32_from_fp16_params"][0]]
    assert keys == ["group0.0", "group0.1"]


def test_without_native_fp32_parameters_the_state_is_upstreams(megatron: SimpleNamespace) -> None:
    trained = Trained(megatron, [B, B], [B])
    plain = trained.sharded()
    with overlay_on(state_ids.OVERLAY, megatron.optimizer):
        covered = trained.sharded()

    pairs = list(zip(entries(plain), entries(covered), strict=True))
    assert len(pairs) == 9
    assert all(one.key == other.key and one.data is other.data for one, other in pairs)


def test_groups_are_back_even_when_upstream_fails(megatron: SimpleNamespace) -> None:
    trained = Trained(megatron, [B, F])
    groups = trained.optimizer.float16_groups, trained.optimizer.fp32_from_float16_groups
    del trained.model["group0.1"]

    with overlay_on(state_ids.OVERLAY, megatron.optimizer), pytest.raises(KeyError):
        trained.sharded()

    assert trained.optimizer.float16_groups is groups[0]
    assert trained.optimizer.fp32_from_float16_groups is groups[1]


def test_each_witness_sees_its_defect_and_its_end(megatron: SimpleNamespace) -> None:
    for overlay, module in (
        (state_ids.OVERLAY, megatron.optimizer),
        (distributed_order.OVERLAY, megatron.distributed),
    ):
        assert overlay.self_test(module).broken
        with overlay_on(overlay, module):
            assert not overlay.self_test(module).broken
        assert overlay.self_test(module).broken


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
    constructor, _ = distributed_order.OVERLAY.replacements["stale-order"]
    constructor.make(build, megatron.distributed)(optimizer)
    assert sizes(optimizer) == [8, 4, 6, 5]


def test_an_optimizer_without_groups_is_left_alone(megatron: SimpleNamespace) -> None:
    """A rank without parameters, and Megatron-FSDP: upstream's constructor returns early."""
    constructor, _ = distributed_order.OVERLAY.replacements["stale-order"]
    optimizer = SimpleNamespace()

    constructor.make(lambda self, stub: setattr(self, "is_stub_optimizer", stub), megatron.distributed)(optimizer, True)

    assert vars(optimizer) == {"is_stub_optimizer": True}
