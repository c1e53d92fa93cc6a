"""Recognition and dequantization of quantized tensors. Tensor classes of our own; upstream's are in test_fp8_engine*."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megacpp_overlays.runtime import quantized

BF16 = torch.bfloat16


class Wrapper(torch.Tensor):
    """A tensor without storage around a payload of another dtype. Any operation sees the dequantized value."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor, dtype: torch.dtype = BF16, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=dtype, requires_grad=requires_grad)
        made.payload = payload
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.payload.to(each.dtype) if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


class Opaque(Wrapper):
    """A tensor without a `dequantize` of its own."""


class Quantized(Wrapper):
    """A tensor that dequantizes outside of autograd, as some upstream classes do."""

    def dequantize(self) -> torch.Tensor:
        return self.payload.to(self.dtype)


class Itself(Wrapper):
    """A tensor that dequantizes to the tensor that it holds, and not to a copy."""

    def dequantize(self) -> torch.Tensor:
        return self.payload


class WithStorage(torch.Tensor):
    def dequantize(self) -> torch.Tensor:
        raise AssertionError("no test dequantizes it")


def of_transformer_engine(name: str = "QuantizedTensor", module: str = "transformer_engine.pytorch.somewhere") -> type:
    """Return a class as upstream has it: a family of its own, recognised by the name of its base."""

    def dequantize(self: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.payload.to(dtype)

    return type(name, (Wrapper,), {"__module__": module, "dequantize": dequantize})


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 3), dtype=torch.uint8)


PLAIN: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.ones(2),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "an empty tensor": lambda: torch.empty(0),
    "a tensor on the meta device": lambda: torch.ones(2, device="meta"),
    "a subclass with a storage": lambda: torch.ones(2).as_subclass(WithStorage),
    "a wrapper that cannot be opened": lambda: Opaque(ones()),
    "a wrapper without elements": lambda: Quantized(ones(0)),
    "a fake tensor": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    "nothing": lambda: None,
    "a number": lambda: 3.0,
}


@pytest.mark.parametrize("name", PLAIN)
def test_tensors_that_are_not_quantized(name: str) -> None:
    assert not quantized.is_quantized(PLAIN[name]())


def test_a_wrapper_without_storage_that_dequantizes_itself_is_quantized() -> None:
    assert quantized.is_quantized(Quantized(ones()))


def test_the_family_of_transformer_engine_is_quantized_with_any_storage() -> None:
    base = of_transformer_engine()
    derived = type("Anything", (base,), {"__module__": "transformer_engine.pytorch.tensor.later"})
    assert quantized.is_quantized(base(ones()))
    assert quantized.is_quantized(derived(ones(0)))
    assert quantized.is_quantized(type("Subclassed", (derived,), {"__module__": "a.custom.projection"})(ones()))


def test_a_wrapper_whose_pointer_cannot_be_asked_for_has_no_storage() -> None:
    class Refuses(Quantized):
        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    assert quantized.is_quantized(Refuses(ones()))


@pytest.mark.parametrize("cls", [Quantized, Itself, of_transformer_engine()])
def test_opening_keeps_shape_dtype_and_values(cls: type) -> None:
    payload = torch.arange(6.0).view(2, 3).to(BF16)
    opened = quantized.dequantized(cls(payload))
    assert type(opened) is torch.Tensor
    assert torch.equal(opened, payload)
    assert opened.dtype is BF16


@pytest.mark.parametrize("cls", [Quantized, Itself, of_transformer_engine()])
def test_gradients_reach_a_wrapper_whose_dequantize_forgets_them(cls: type) -> None:
    tensor = cls(ones().to(BF16), requires_grad=True)
    assert not tensor.dequantize(**({"dtype": BF16} if cls.__name__ == "QuantizedTensor" else {})).requires_grad

    (quantized.dequantized(tensor) * 3).sum().backward()

    assert torch.equal(tensor.grad, torch.full((2, 3), 3.0, dtype=BF16))


def test_gradients_go_on_to_the_tensor_that_the_wrapper_was_made_from() -> None:
    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return Quantized(x.to(torch.uint8))

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    x = torch.ones(2, 3, dtype=BF16, requires_grad=True)
    tensor = Quantize.apply(x)
    assert tensor.grad_fn is not None

    (quantized.dequantized(tensor) * 5).sum().backward()

    assert torch.equal(x.grad, torch.full((2, 3), 5.0, dtype=BF16))


def test_a_dequantize_that_carries_gradients_is_left_alone() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> torch.Tensor:
            return tensor.payload.to(BF16)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    class Carries(Wrapper):
        def dequantize(self) -> Any:
            return Straight.apply(self)

    tensor = Carries(ones(), requires_grad=True)
    opened = quantized.dequantized(tensor)
    assert type(opened.grad_fn).__name__ == "StraightBackward"


def test_the_payload_of_the_wrapper_gets_no_history() -> None:
    payload = ones().to(BF16)
    opened = quantized.dequantized(Itself(payload, requires_grad=True))
    assert opened.requires_grad
    assert payload.grad_fn is None
    assert not payload.requires_grad


def test_without_gradients_there_is_no_graph() -> None:
    with torch.no_grad():
        assert not quantized.dequantized(Quantized(ones(), requires_grad=True)).requires_grad
    assert not quantized.dequantized(Quantized(ones())).requires_grad


def test_another_dtype_becomes_the_one_that_was_promised() -> None:
    class Wide(Wrapper):
        def dequantize(self) -> torch.Tensor:
            return self.payload.float()

    tensor = Wide(ones(), requires_grad=True)
    opened = quantized.dequantized(tensor)
    assert opened.dtype is BF16
    opened.sum().backward()
    assert tensor.grad.dtype is BF16


@pytest.mark.parametrize("answer", [None, torch.ones(1), "self"])
def test_results_that_dequantize_may_not_return(answer: Any) -> None:
    class Wrong(Wrapper):
        def dequantize(self) -> Any:
            return self if answer == "self" else answer

    with pytest.raises(TypeError, match=r"Wrong\.dequantize\(\) returned .*, which is no plain tensor of its shape"):
        quantized.dequantized(Wrong(ones()))


def test_a_class_that_is_not_known_is_named_by_itself() -> None:
    assert quantized.recipe(Quantized(ones())) == "Quantized"


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([torch.uint8, BF16, torch.float32])), max_size=4))
def test_the_payload_is_the_sum_of_its_buffers_each_counted_once(buffers: list[tuple[int, torch.dtype]]) -> None:
    tensor = Quantized(ones(4))
    for number, (size, dtype) in enumerate(buffers):
        buffer = torch.zeros(size, dtype=dtype)
        setattr(tensor, f"_buffer_{number}", buffer)
        setattr(tensor, f"_again_{number}", buffer)
    assert quantized.payload_bytes(tensor) == 4 + sum(size * dtype.itemsize for size, dtype in buffers)


def test_importing_it_imports_nothing_large(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = (
        "import sys, megacpp_overlays.runtime.quantized, megacpp_overlays.fp8_sparse_mla\n"
        "print({'torch', 'transformer_engine', 'megatron'} & set(sys.modules))"
    )
    assert run_python(code, MEGACPP_OVERLAYS="off").stdout == "set()\n"
