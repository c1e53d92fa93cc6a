"""Released tensor classes of Transformer Engine, 2.8 to 2.20: each is recognised, named and dequantized in spite of changes between them.

Upstream's own Python from the wheels; only the compiled half is replaced (see fp8_engine.py). Where it dequantizes, a
constant is returned, so these tests are about wrappers and autograd and not about numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fp8_engine
import pytest
import torch

from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
from megacpp_overlays.runtime import quantized

# A class moved, was renamed, learnt something or lost something in each of these.
RELEASES = ["2.8.0", "2.9.0", "2.10.0", "2.13.0", "2.14.1", "2.17.1", "2.18.0", "2.20.2"]
SHAPE = (256, 128)
BF16 = torch.bfloat16

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's own deprecations


@pytest.fixture(scope="module", params=RELEASES)
def engine(request: pytest.FixtureRequest, wheel: Callable[[str, str], Path]) -> Iterator[SimpleNamespace]:
    with fp8_engine.loaded(wheel("transformer-engine", request.param)) as found:
        found.release = request.param
        found.tex.dequantize = lambda tensor, _: torch.full(tensor.size(), 2.0, dtype=BF16)
        for name in ("MXFP8Tensor", "NVFP4Tensor"):  # newer releases go to the GPU and back
            getattr(found, name).to = lambda tensor, *_, **__: tensor
        yield found


def make(engine: SimpleNamespace, name: str, *, requires_grad: bool = True) -> Any:
    """Return a tensor of a class, by the constructor of that release."""
    cls = getattr(engine, name)
    takes = {name for base in cls.__mro__ for name in inspect.signature(base.__new__).parameters}
    common: dict[str, Any] = {"shape": SHAPE, "dtype": BF16, "requires_grad": requires_grad}
    common |= {"device": "cpu"} if "device" in takes else {}

    def data(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0x40, dtype=torch.uint8)  # 2.0 in E4M3

    e4m3 = engine.tex.DType.kFloat8E4M3
    match name:
        case "Float8Tensor":
            return cls(**common, data=data(*SHAPE), fp8_scale_inv=torch.ones(1), fp8_dtype=e4m3)
        case "IdentityTensor":
            return cls(**common, hp_data=torch.full(SHAPE, 2.0, dtype=BF16))
        case "HybridQuantizedTensor":
            halves = [make(engine, half, requires_grad=False) for half in ("Float8Tensor", "IdentityTensor")]
            quantizer = engine.HybridQuantizer(
                rowwise_quantizer=engine.IdentityQuantizer(), columnwise_quantizer=engine.IdentityQuantizer()
            )
            return cls(**common, rowwise_storage=halves[0], columnwise_storage=halves[1], quantizer=quantizer)
    rows = {"rowwise_data": data(*SHAPE), "rowwise_scale_inv": torch.ones(2, 4)}
    if name == "NVFP4Tensor":  # two values of 2.0 in a byte, blocks of 16 with scales of 1.0 in E4M3
        ones = torch.full((256, 8), 0x38, dtype=torch.uint8)
        rows = {"rowwise_data": torch.full((256, 64), 0x44, dtype=torch.uint8), "rowwise_scale_inv": ones}
    columns = {"columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    amax = torch.full((1,), 6.0 * 448)  # the scale of all blocks is 1.0 then
    ready = engine.tex.Float8BlockScaleTensorFormat.GEMM_READY
    drifting = {
        "fp8_dtype": e4m3,
        "fp4_dtype": engine.tex.DType.kFloat4E2M1,
        "is_2D_scaled": True,
        "data_format": ready,
        "with_gemm_swizzled_scales": False,
        "amax_rowwise": amax,
        "amax_columnwise": amax,
    }
    return cls(**common, **rows, **columns, **{name: value for name, value in drifting.items() if name in takes})


def classes(engine: SimpleNamespace) -> list[str]:
    return [name for name in fp8_engine.CLASSES if hasattr(engine, name)]


def test_the_classes_of_a_release_are_all_here(engine: SimpleNamespace) -> None:
    new = engine.release == "2.20.2"
    assert len(classes(engine)) == (6 if new else 4)


def test_every_class_says_bf16_points_nowhere_and_is_recognised(engine: SimpleNamespace) -> None:
    for name in classes(engine):
        tensor = make(engine, name)
        assert (tensor.dtype, tensor.is_contiguous(), tensor.data_ptr()) == (BF16, True, 0), name
        assert quantized.is_quantized(tensor), name
        assert quantized.is_quantized(tensor.contiguous()), name


def test_recipes_have_the_same_name_in_every_release(engine: SimpleNamespace) -> None:
    named = {name: quantized.recipe(make(engine, name)) for name in classes(engine)}
    expected = {
        "Float8Tensor": "per-tensor FP8",
        "MXFP8Tensor": "MXFP8",
        "Float8BlockwiseQTensor": "blockwise FP8",
        "NVFP4Tensor": "NVFP4",
        "HybridQuantizedTensor": "hybrid of per-tensor FP8 by rows and identity, not quantized by columns",
        "IdentityTensor": "identity, not quantized",
    }
    assert named == {name: expected[name] for name in named}


def test_the_payload_of_each_class_is_found_under_its_own_name(engine: SimpleNamespace) -> None:
    elements = SHAPE[0] * SHAPE[1]
    expected = {
        "Float8Tensor": elements + 4,
        "MXFP8Tensor": elements + 32,
        "Float8BlockwiseQTensor": elements + 32,
        "NVFP4Tensor": elements // 2 + elements // 16 + 4,
        "HybridQuantizedTensor": elements + 4 + 2 * elements,
        "IdentityTensor": 2 * elements,
    }
    counted = {name: quantized.payload_bytes(make(engine, name)) for name in classes(engine)}
    assert counted == {name: expected[name] for name in counted}


def test_opening_gives_a_plain_tensor_whose_gradient_reaches_the_wrapper(engine: SimpleNamespace) -> None:
    for name in classes(engine):
        tensor = make(engine, name)
        opened = quantized.dequantized(tensor)
        assert (type(opened), opened.dtype, opened.shape) == (torch.Tensor, BF16, SHAPE), name
        opened.sum().backward()
        assert tensor.grad is not None, name
        assert tensor.grad.shape == SHAPE, name
        assert bool((opened == 2).all()), name


def test_without_gradients_opening_leaves_no_graph(engine: SimpleNamespace) -> None:
    for name in classes(engine):
        with torch.no_grad():
            assert not quantized.dequantized(make(engine, name)).requires_grad, name
        assert not quantized.dequantized(make(engine, name, requires_grad=False)).requires_grad, name


def test_upstreams_own_dequantize_cuts_gradients_where_ours_must_not(engine: SimpleNamespace) -> None:
    """Why the seam does not simply call it."""
    release = tuple(int(part) for part in engine.release.split("."))
    cut = {name for name in classes(engine) if not make(engine, name).dequantize(dtype=BF16).requires_grad}
    blockwise = {"Float8BlockwiseQTensor"} if release < (2, 18) else set()
    assert cut == blockwise | ({"HybridQuantizedTensor", "IdentityTensor"} & set(classes(engine)))


READ = ["Float8Tensor", "Float8BlockwiseQTensor"]


def test_a_learner_takes_the_gradient_that_the_dequantized_tensor_would(engine: SimpleNamespace) -> None:
    above = torch.randn(SHAPE).to(BF16)
    for name in READ:
        tensor = make(engine, name)
        learner = transformer_engine_keys.learner(tensor)
        assert learner is not None
        assert (type(learner), learner.shape, learner.dtype) == (torch.Tensor, tensor.shape, BF16), name
        assert learner.untyped_storage().nbytes() == 2, name
        (found,) = torch.autograd.grad(learner, tensor, above)
        (expected,) = torch.autograd.grad(quantized.dequantized(tensor), tensor, above)
        assert type(found) is type(expected), name
        assert torch.equal(found, expected), name


def test_there_is_no_learner_where_nothing_is_learnt(engine: SimpleNamespace) -> None:
    for name in READ:
        assert transformer_engine_keys.learner(make(engine, name, requires_grad=False)) is None
        with torch.no_grad():
            assert transformer_engine_keys.learner(make(engine, name)) is None


def test_slices_of_float8_stay_quantized_and_permutations_do_not(engine: SimpleNamespace) -> None:
    tensor = make(engine, "Float8Tensor")
    for other in (tensor[:, 0], tensor[0:4], tensor.view(-1, 64), tensor.detach(), tensor.to(BF16)):
        assert quantized.is_quantized(other.contiguous())
        assert other.contiguous().data_ptr() == 0
    permuted = tensor.permute(1, 0)
    assert type(permuted) is torch.Tensor
    assert permuted.requires_grad
