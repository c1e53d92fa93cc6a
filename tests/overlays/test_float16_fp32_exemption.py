"""Float16Module with the overlay: exempt tensors stay as they are, and all others are cast as upstream casts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_seams import assert_same_bits, assert_self_test, placed, stock
from places import ROOT, SUPPORT
from releases import newest, only
from reproduced_pack import assert_repaired, measured_on
from warm_python import MEGATRON

from megacpp_overlays import fp32_marks
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.feature_probes.float16_fp32_exemption import BLANKET_CAST, MARKS_HONOURED, TARGET
from megacpp_overlays.fp32_marks import declare, keep_in_fp32, keeps_in_fp32
from megacpp_overlays.overlays.float16_fp32_exemption import OVERLAY
from megacpp_overlays.repro import Neighbour, neighbour

EXACT = 1 + 2**-23
"""The first fp32 number after 1; both half precisions round it to 1."""
PACK = "16"
NEIGHBOURS = [each for each in neighbour.load(ROOT / "packs/16-float16-fp32-exemption") if each.overlay == OVERLAY.id]

measured = measured_on(PACK, "0.14.0")


def test_a_release_is_broken_without_the_overlays_and_right_with_them(measured: Any) -> None:
    assert_repaired(measured, parts=3, may_be_blocked={"distributed-cpu"})


def test_the_newest_release_is_broken_without_the_overlays_and_right_with_them(
    megatron_says: Callable[..., Any],
) -> None:
    assert_repaired(megatron_says(newest(), SUPPORT / "reproduced.py", PACK), parts=3)


# In this process


module = stock(TARGET.module)


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, BLANKET_CAST)


@pytest.mark.parametrize("each", NEIGHBOURS, ids=lambda each: each.name)
def test_results_that_are_right_without_the_overlay_have_the_same_bits(each: Neighbour, module: ModuleType) -> None:
    assert_same_bits(each, OVERLAY, module, BLANKET_CAST)


@pytest.fixture
def wrap(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """Wrap a module with the overlay on: `wrap(model)`, `wrap(model, "fp16")`."""
    with placed(OVERLAY, BLANKET_CAST, module):
        yield lambda model, dtype="bf16": module.Float16Module(config(dtype), model)


def config(dtype: str | None = "bf16") -> SimpleNamespace:
    return SimpleNamespace(fp16=dtype == "fp16", bf16=dtype == "bf16", virtual_pipeline_model_parallel_size=None)


def exact(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape or (3,), EXACT))


class Mixer(torch.nn.Module):
    """A mixer with the contract of Mamba-3: some parameters in fp32, projections in the model's dtype, and buffers."""

    def __init__(self, *, is_mimo: bool = True) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(4, 4)
        self.dt_bias = exact()
        self.B_bias = exact(2, 3)
        self.C_bias = exact(2, 3)
        if is_mimo:
            self.mimo_x, self.mimo_z, self.mimo_o = exact(2), exact(2), exact(2)
        self.D = exact()
        self.D._no_weight_decay = True
        self.out_proj = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((2,), EXACT))
        self.register_buffer("cache", torch.full((2,), EXACT), persistent=False)
        self.register_buffer("index", torch.arange(3))


FP32 = {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}


@pytest.fixture
def mamba3() -> type[Mixer]:
    """A class under the qualified name of mamba-ssm's Mamba3, which needs a GPU to be imported."""
    module, _, name = fp32_marks.MAMBA3.rpartition(".")
    return type(name, (Mixer,), {"__module__": module, "__qualname__": name})


def is_exact(parameter: torch.Tensor) -> bool:
    return parameter.dtype is torch.float32 and bool((parameter == EXACT).all())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mamba3_keeps_its_seven_parameters_and_nothing_else(
    wrap: Callable[..., Any], mamba3: type[Mixer], dtype: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), mamba3())
    before = dict(model.named_parameters())

    wrap(model, dtype)

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert {name.rpartition(".")[2] for name, value in after.items() if value.dtype is torch.float32} == FP32
    assert all(is_exact(value) for name, value in after.items() if name.rpartition(".")[2] in FP32)
    assert after["1.in_proj.weight"].dtype is after["0.bias"].dtype is half
    assert model[1].scale.dtype is model[1].cache.dtype is half
    assert model[1].index.dtype is torch.int64
    assert model[1].D._no_weight_decay


def test_mamba3_without_mimo_needs_no_other_declaration(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    model = mamba3(is_mimo=False)

    wrap(model)

    assert is_exact(model.D)


def test_a_subclass_inherits_the_declaration(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    class TunedMamba3(mamba3):  # type: ignore[misc, valid-type]
        pass

    model = TunedMamba3()
    wrap(model)

    assert is_exact(model.dt_bias)
    assert model.in_proj.weight.dtype is torch.bfloat16


def test_attributes_gradient_and_hooks_stay(wrap: Callable[..., Any]) -> None:
    model = torch.nn.Linear(2, 2)
    weight = keep_in_fp32(model.weight)
    weight.tensor_model_parallel = True
    weight.grad = torch.full((2, 2), EXACT)
    pointer, gradient, calls = weight.data_ptr(), weight.grad, []
    weight.register_hook(calls.append)

    wrap(model)

    assert model.weight is weight
    assert weight.data_ptr() == pointer
    assert weight.grad is gradient
    assert is_exact(gradient)
    assert weight.tensor_model_parallel
    assert weight.requires_grad
    weight.sum().backward()
    assert len(calls) == 1


def test_a_declared_registration_exempts_the_tied_one_elsewhere(wrap: Callable[..., Any]) -> None:
    @keeps_in_fp32("weight")
    class Head(torch.nn.Linear):
        pass

    embedding, head = torch.nn.Embedding(2, 2), Head(2, 2, bias=False)
    head.weight = embedding.weight

    wrap(torch.nn.ModuleList([embedding, head]))

    assert embedding.weight is head.weight
    assert embedding.weight.dtype is torch.float32


def test_a_meta_parameter_keeps_its_dtype(wrap: Callable[..., Any]) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    keep_in_fp32(model.bias)

    wrap(model)

    assert (model.bias.dtype, model.weight.dtype) == (torch.float32, torch.bfloat16)
    assert model.bias.is_meta


def test_a_parameter_that_is_none_stays_none(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    model = mamba3()
    model.D = None

    wrap(model)

    assert model.D is None
    assert is_exact(model.dt_bias)


def test_a_failing_constructor_puts_everything_back(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    model = mamba3()
    before = dict(model.named_parameters())

    with pytest.raises(Exception, match=r"fp16 or config\.bf16"):
        wrap(model, None)

    assert list(model.named_parameters()) == list(before.items())
    assert all(model.get_parameter(name) is value for name, value in before.items())
    assert is_exact(model.D)


def test_a_cast_that_fails_half_way_puts_everything_back(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    class Stubborn(torch.nn.Module):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not me")

    model = torch.nn.Sequential(mamba3(), Stubborn())

    with pytest.raises(RuntimeError, match="not me"):
        wrap(model)

    assert is_exact(model[0].D)


def test_a_module_with_an_apply_of_its_own_finds_its_parameters(wrap: Callable[..., Any]) -> None:
    class Careful(torch.nn.Module):
        """A third-party module that avoids the cast with its own `_apply`, which the overlay must not break."""

        def __init__(self) -> None:
            super().__init__()
            self.A_log = keep_in_fp32(exact())
            self.weight = exact()
            self.A_log.grad = torch.full((3,), EXACT)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            self.A_log.data = self.A_log.data.float()
            return self

    model = Careful()
    log = model.A_log
    wrap(model)

    assert model.A_log is log
    assert is_exact(log)
    assert is_exact(log.grad)
    assert model.weight.dtype is torch.bfloat16
    assert "_apply" not in vars(model)


class Container(torch.nn.Module):
    """A parent that looks at an exempt parameter of its child while it is cast."""

    def __init__(self, child: torch.nn.Module) -> None:
        super().__init__()
        self.child = child
        self.plain = torch.nn.Parameter(torch.full((3,), EXACT))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)
        self.seen = [parameter for parameter in (self.child.dt_bias, self.plain) if parameter is not None]
        return result


class OwnCast(torch.nn.Module):
    """A root that saves and restores a parameter around its cast, as home-made fixes do."""

    def __init__(self, child: torch.nn.Module) -> None:
        super().__init__()
        self.child = child

    def bfloat16(self) -> Any:
        before = self.child.dt_bias.data.clone()
        result = super().bfloat16()
        self.child.dt_bias.data = before
        return result


@pytest.mark.parametrize("parent", [Container, OwnCast])
def test_a_parent_with_a_cast_of_its_own_finds_the_parameters_of_its_children(
    wrap: Callable[..., Any], mamba3: type[Mixer], parent: type[torch.nn.Module]
) -> None:
    model = parent(mamba3())
    before = dict(model.named_parameters())

    wrap(model)

    assert is_exact(model.child.dt_bias)
    assert dict(model.named_parameters()) == before
    if parent is Container:
        assert len(model.seen) == 2
        assert model.plain.dtype is torch.bfloat16


def test_a_recurrent_module_still_knows_its_weights(wrap: Callable[..., Any]) -> None:
    model = torch.nn.LSTM(2, 2)
    keep_in_fp32(model.weight_ih_l0)

    wrap(model)

    assert [weight.dtype for weight in model._flat_weights] == [torch.float32] + [torch.bfloat16] * 3
    assert model._flat_weights[0] is model.weight_ih_l0


def test_wrapping_a_wrapped_model_keeps_it(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    model = mamba3()

    wrap(wrap(model))

    assert is_exact(model.D)


def test_nothing_stays_on_the_model(wrap: Callable[..., Any], mamba3: type[Mixer]) -> None:
    model = mamba3()
    attributes = {name: set(vars(each)) for name, each in model.named_modules()}

    wrapped = wrap(model)

    assert {name: set(vars(each)) for name, each in model.named_modules()} == attributes
    assert not wrapped._forward_hooks
    assert not wrapped._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_witness_does_not_depend_on_defaults(module: ModuleType, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), placed(OVERLAY, BLANKET_CAST, module):
            assert not OVERLAY.self_test(module).broken
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_replaced_cast_of_torch_runs(wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine replaces these methods of torch.nn.Module."""
    calls = []

    def bfloat16(self: torch.nn.Module) -> torch.nn.Module:
        calls.append(self)
        return self._apply(lambda tensor: tensor.to(torch.bfloat16))

    monkeypatch.setattr(torch.nn.Module, "bfloat16", bfloat16)
    model = torch.nn.Linear(2, 2)
    keep_in_fp32(model.bias)

    wrap(model)

    assert calls == [model]
    assert (model.bias.dtype, model.weight.dtype) == (torch.float32, torch.bfloat16)


# Declarations of exempt tensors and classes.


def test_a_class_can_be_declared_by_name(wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_marks, "_by_name", {})

    class Foreign(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.D, self.weight = exact(), exact(), exact()

    name = f"{Foreign.__module__}.{Foreign.__qualname__}"
    declare(name, "A_log")
    declare(name, "D")
    model = Foreign()
    wrap(model)

    assert is_exact(model.A_log)
    assert is_exact(model.D)
    assert model.weight.dtype is torch.bfloat16


def test_a_declared_parameter_that_is_missing_is_an_error(wrap: Callable[..., Any]) -> None:
    @keeps_in_fp32("weights")
    class Misspelt(torch.nn.Linear):
        pass

    with pytest.raises(OverlayError, match="Misspelt is declared to keep weights in fp32"):
        wrap(Misspelt(2, 2))


def test_an_optional_name_may_be_missing_and_a_subclass_may_loosen_a_required_one(wrap: Callable[..., Any]) -> None:
    @keeps_in_fp32("weight", "extra", optional=("bias",))
    class Base(torch.nn.Linear):
        pass

    @keeps_in_fp32(optional=("extra",))
    class Lean(Base):
        pass

    model = Lean(2, 2, bias=False)
    wrap(model)

    assert model.weight.dtype is torch.float32


def test_two_declarations_on_one_class_add_up(wrap: Callable[..., Any]) -> None:
    @keeps_in_fp32("weight")
    @keeps_in_fp32("bias")
    class Both(torch.nn.Linear):
        pass

    model = Both(2, 2)
    wrap(model)

    assert model.weight.dtype is model.bias.dtype is torch.float32


def test_only_parameters_can_be_marked() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Parameter, not Tensor"):
        keep_in_fp32(torch.ones(1))
    parameter = exact()
    assert keep_in_fp32(parameter) is parameter
    assert parameter.keep_in_fp32 is True


def test_a_declaration_names_something() -> None:
    with pytest.raises(TypeError, match="at least one"):
        declare("package.Class")
    with pytest.raises(TypeError, match="at least one"):
        keeps_in_fp32()


def test_a_wrapper_around_something_that_is_no_module_is_left_to_upstream(module: ModuleType) -> None:
    class Foreign:
        def bfloat16(self) -> Foreign:
            return self

    with placed(OVERLAY, BLANKET_CAST, module), pytest.raises(TypeError, match="not a Module subclass"):
        module.Float16Module(config(), Foreign())


# The other shape: upstream honours marks, the overlay sets them.


@pytest.fixture
def honouring() -> type:
    """A wrapper of our own that honours marks, like main's."""

    class HonouringWrapper(torch.nn.Module):
        def __init__(self, config: Any, module: torch.nn.Module) -> None:
            super().__init__()
            dtype = torch.float16 if config.fp16 else torch.bfloat16

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor if getattr(tensor, "keep_in_fp32", False) else tensor.to(dtype)

            self.module = module._apply(cast)

    return HonouringWrapper


def test_where_marks_are_honoured_the_overlay_only_sets_them(honouring: type, mamba3: type[Mixer]) -> None:
    (replacement,) = OVERLAY.replacements[MARKS_HONOURED]
    seam = replacement.make(honouring.__init__, sys.modules[__name__])
    model = mamba3()
    keep_in_fp32(model.in_proj.weight)
    before = dict(model.named_parameters())

    seam(honouring.__new__(honouring), config(), module=model)

    after = dict(model.named_parameters())
    assert list(after) == list(before)
    kept = {name for name, value in after.items() if value.dtype is torch.float32}
    assert kept == FP32 | {"in_proj.weight"}
    assert {name for name, value in after.items() if getattr(value, "keep_in_fp32", False)} == kept
    assert all(is_exact(after[name]) for name in FP32)


def test_the_witness_tells_honoured_marks_from_set_ones(honouring: type) -> None:
    (replacement,) = OVERLAY.replacements[MARKS_HONOURED]
    module: Any = SimpleNamespace(Float16Module=honouring)
    assert OVERLAY.witness is not None
    assert OVERLAY.witness(module).broken
    assert "marked" not in OVERLAY.witness(module).seen

    honouring.__init__ = replacement.make(honouring.__init__, module)  # type: ignore[misc]

    assert not OVERLAY.self_test(module).broken


# Any tree of modules: exempt tensors untouched, all others as upstream's cast of the same tree.

TENSORS = st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]),
    st.sampled_from(["parameter", "parameter", "buffer", "cache", "none"]),
    st.booleans(),  # marked
    st.integers(0, 5),  # with 0, tied to the first parameter that was made
)
TREES = st.recursive(
    st.tuples(st.lists(TENSORS, max_size=3), st.just([])),
    lambda children: st.tuples(st.lists(TENSORS, max_size=3), st.lists(children, max_size=3)),
    max_leaves=6,
)


def grow(tree: Any, made: list[torch.nn.Parameter]) -> torch.nn.Module:
    module = torch.nn.Module()
    for number, (dtype, kind, marked, tie) in enumerate(tree[0]):
        value = torch.tensor([EXACT, 3.0, -EXACT], dtype=torch.float64).to(dtype)
        match kind:
            case "parameter":
                fresh = torch.nn.Parameter(value, requires_grad=dtype.is_floating_point)
                parameter = made[0] if made and tie == 0 else fresh
                made.append(parameter)
                module.register_parameter(f"p{number}", keep_in_fp32(parameter) if marked else parameter)
            case "none":
                module.register_parameter(f"p{number}", None)
            case _:
                module.register_buffer(f"p{number}", value, persistent=kind == "buffer")
    for number, child in enumerate(tree[1]):
        module.add_module(f"m{number}", grow(child, made))
    return module


def tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


@settings(deadline=None, max_examples=60)
@given(tree=TREES, dtype=st.sampled_from(["bf16", "fp16"]))
def test_any_tree_ends_as_upstreams_cast_except_for_exempt_tensors(module: ModuleType, tree: Any, dtype: str) -> None:
    model, reference = grow(tree, []), grow(tree, [])
    before = dict(tensors(model))
    bits = {name: value.detach().clone() for name, value in before.items()}
    exempt = {
        name
        for name, value in before.items()
        if isinstance(value, torch.nn.Parameter)
        and value.dtype is torch.float32
        and getattr(value, "keep_in_fp32", False)
    }

    module.Float16Module(config(dtype), reference)
    with placed(OVERLAY, BLANKET_CAST, module):
        module.Float16Module(config(dtype), model)

    assert [name for name, _ in tensors(model)] == [name for name, _ in tensors(reference)]
    for (name, value), (_, expected) in zip(tensors(model), tensors(reference), strict=True):
        if isinstance(value, torch.nn.Parameter):
            assert value is before[name]
        wanted = bits[name] if name in exempt else expected.detach()
        assert value.dtype is wanted.dtype, name
        assert torch.equal(value.detach(), wanted), name


# The overlays that it needs, in a fresh interpreter.

WHOLE_WAY = """
import warnings
warnings.simplefilter("ignore")
import megacpp_overlays
import torch
from types import SimpleNamespace
from megacpp_overlays.fp32_marks import keep_in_fp32
from megatron.core.transformer.module import Float16Module

model = torch.nn.Linear(2, 2)
model.weight.data.fill_(1 + 2**-23)
keep_in_fp32(model.weight)
Float16Module(SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None), model)
audit = {record.overlay.id: record for record in megacpp_overlays.audit().records}
record = audit["float16-fp32-exemption"]
print(record.decision.value, record.shape, model.weight.dtype, model.weight[0, 0].item() == 1 + 2**-23,
      model.bias.dtype, torch.cuda.is_initialized(), record.reason)
"""


@pytest.mark.parametrize(
    "needed", only(["float16-optimizer-state-ids", "float16-distributed-order"], ["float16-distributed-order"])
)
def test_without_an_overlay_that_saves_such_a_model_upstream_is_as_it_was(
    needed: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Both optimizers are imported after `Float16Module`, or not at all, so the decision is the one that they would get."""
    done = run_python(WHOLE_WAY, after=MEGATRON, MEGACPP_OVERLAYS_DISABLE=needed)

    seen = done.stdout.strip().splitlines()[-1]

    assert seen.startswith("conflict blanket-cast torch.bfloat16 False torch.bfloat16 False ")
    assert f"it needs {needed}, which is disabled here: " in seen
