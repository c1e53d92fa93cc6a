"""Cases for the real, compiled Transformer Engine: `python fp8_engine_cases.py`, in an environment of its own.

Every function `case_...` is one case. They share a process, because importing the engine takes longer than all of
them. The output is one JSON object: case name to "passed" or to the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformer_engine.pytorch as engine
import transformer_engine_torch as tex
from stored_keys import LAYOUTS
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensor, HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer, IdentityTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

from megacpp_overlays.feature_probes import dsa_sparse_attention
from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
from megacpp_overlays.loader import seams
from megacpp_overlays.overlays import dsa_sparse_attention as attention
from megacpp_overlays.overlays import fp8_quantized_unwrap as overlay
from megacpp_overlays.runtime import float8_payload, quantized

B, E4M3 = torch.bfloat16, tex.DType.kFloat8E4M3
QUERY, KEY = (2, 2, 16, 576), (2, 2, 1, 576)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return bf16 values that E4M3 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-15, 16, shape, generator=generator) / 4).to(B)


def float8(plain: torch.Tensor, *, requires_grad: bool = False) -> Any:
    """Return the Float8Tensor of values that it holds exactly, scaled by two on the way."""
    data = (plain.float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.tensor([2.0])
    common = {"dtype": B, "device": "cpu", "requires_grad": requires_grad}
    return engine.Float8Tensor(shape=plain.shape, data=data, fp8_scale_inv=scale, fp8_dtype=E4M3, **common)


def identity(plain: torch.Tensor, *, requires_grad: bool = False) -> Any:
    return IdentityTensor(shape=plain.shape, dtype=B, hp_data=plain, requires_grad=requires_grad, device="cpu")


def hybrid(plain: torch.Tensor, *, requires_grad: bool = False) -> Any:
    quantizer = HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=IdentityQuantizer())
    return HybridQuantizedTensor(
        shape=plain.shape,
        dtype=B,
        rowwise_storage=float8(plain),
        columnwise_storage=identity(plain),
        quantizer=quantizer,
        requires_grad=requires_grad,
        device="cpu",
    )


def blockwise(plain: torch.Tensor, *, requires_grad: bool = False) -> Any:
    rows, columns = plain.numel() // plain.size(-1), plain.size(-1)
    return Float8BlockwiseQTensor(
        shape=plain.shape,
        dtype=B,
        rowwise_data=plain.to(torch.float8_e4m3fn).view(torch.uint8),
        rowwise_scale_inv=torch.ones(-(-rows // 128), -(-columns // 512) * 4),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=E4M3,
        quantizer=None,
        is_2D_scaled=True,
        requires_grad=requires_grad,
        device="cpu",
    )


def mxfp8(plain: torch.Tensor) -> Any:
    return MXFP8Tensor(
        shape=plain.shape,
        dtype=B,
        rowwise_data=plain.to(torch.float8_e4m3fn).view(torch.uint8),
        rowwise_scale_inv=torch.full((plain.numel() // plain.size(-1), plain.size(-1) // 32), 127, dtype=torch.uint8),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=E4M3,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        device="cpu",
    )


def nvfp4(plain: torch.Tensor) -> Any:
    return NVFP4Tensor(
        shape=plain.shape,
        dtype=B,
        rowwise_data=torch.zeros(*plain.shape[:-1], plain.size(-1) // 2, dtype=torch.uint8),
        rowwise_scale_inv=torch.zeros(plain.numel() // plain.size(-1), plain.size(-1) // 16, dtype=torch.uint8),
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=torch.ones(1),
        amax_columnwise=torch.ones(1),
        fp4_dtype=tex.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        device="cpu",
    )


OPENED_ON_CPU: dict[str, Callable[..., Any]] = {
    "Float8Tensor": float8,
    "Float8BlockwiseQTensor": blockwise,
    "HybridQuantizedTensor": hybrid,
    "IdentityTensor": identity,
}
ALL = {**OPENED_ON_CPU, "MXFP8Tensor": mxfp8, "NVFP4Tensor": nvfp4}


# Results and attributes of the wrappers


def case_every_wrapper_says_bf16_and_points_nowhere() -> None:
    for name, make in ALL.items():
        tensor = make(values(*QUERY))
        assert type(tensor).__name__ == name
        assert isinstance(tensor, torch.Tensor), name
        assert (tensor.dtype, tensor.is_contiguous(), tensor.shape) == (B, True, QUERY), name
        assert tensor.data_ptr() == 0, name
        assert tensor.untyped_storage().size() == 0, name


def case_contiguous_is_the_wrapper_itself() -> None:
    for name, make in ALL.items():
        tensor = make(values(*QUERY))
        again = tensor.contiguous()
        assert type(again) is type(tensor), name
        assert again.data_ptr() == 0, name
    tensor = float8(values(*QUERY))
    assert tensor.contiguous() is tensor


def case_slices_and_views_of_float8_stay_quantized() -> None:
    tensor = float8(values(*QUERY))
    made = {
        "select": tensor[:, 0],
        "slice": tensor[1:],
        "view": tensor.view(4, 16, 576),
        "reshape": tensor.reshape(2, -1),
        "to": tensor.to(B),
        "detach": tensor.detach(),
    }
    for name, other in made.items():
        assert quantized.is_quantized(other.contiguous()), name
        assert other.contiguous().data_ptr() == 0, name


def case_permutation_and_arithmetic_dequantize_silently() -> None:
    plain = values(*QUERY)
    for name, make in OPENED_ON_CPU.items():
        tensor = make(plain)
        made = {"permute": (tensor.permute(1, 0, 2, 3), plain.permute(1, 0, 2, 3)), "add": (tensor + 1, plain + 1)}
        for operation, (got, expected) in made.items():
            assert type(got) is torch.Tensor, (name, operation)
            assert torch.equal(got, expected), (name, operation)


def case_slicing_an_identity_tensor_with_gradient_fails_in_upstream() -> None:
    """Not ours to repair, but the boundary that opens it first never gets there."""
    try:
        identity(values(*QUERY), requires_grad=True)[:, 0:1]
    except RuntimeError as error:
        assert "differentiable view" in str(error)  # noqa: PT017 - pytest is not in this environment
    else:
        raise AssertionError("upstream can slice it now: say so in quantized.py")


def case_every_wrapper_is_recognised_and_named() -> None:
    named = {name: quantized.recipe(make(values(*QUERY))) for name, make in ALL.items()}
    assert named == {
        "Float8Tensor": "per-tensor FP8",
        "Float8BlockwiseQTensor": "blockwise FP8",
        "HybridQuantizedTensor": "hybrid of per-tensor FP8 by rows and identity, not quantized by columns",
        "IdentityTensor": "identity, not quantized",
        "MXFP8Tensor": "MXFP8",
        "NVFP4Tensor": "NVFP4",
    }
    for make in ALL.values():
        tensor = make(values(*QUERY))
        assert quantized.is_quantized(tensor)
    assert quantized.is_quantized(torch.nn.Parameter(float8(values(*QUERY)), requires_grad=False))
    for quantizer, words in (
        (engine.Float8CurrentScalingQuantizer(E4M3, device=torch.device("cpu")), "per-tensor FP8, current scaling"),
        (engine.Float8Quantizer(torch.ones(1), torch.ones(1), E4M3), "per-tensor FP8, delayed scaling"),
    ):
        tensor = float8(values(*QUERY))
        tensor._quantizer = quantizer
        assert quantized.recipe(tensor) == words


def case_the_payload_is_counted_with_its_scales() -> None:
    plain = values(*QUERY)
    assert quantized.payload_bytes(float8(plain)) == plain.numel() + 4
    assert quantized.payload_bytes(identity(plain)) == 2 * plain.numel()
    assert quantized.payload_bytes(hybrid(plain)) == 3 * plain.numel() + 4


def case_opening_keeps_values_and_gradients_of_every_class() -> None:
    plain = values(*QUERY)
    for name, make in OPENED_ON_CPU.items():
        tensor = make(plain, requires_grad=True)
        opened = quantized.dequantized(tensor)
        assert type(opened) is torch.Tensor, name
        assert opened.data_ptr() != 0, name
        assert torch.equal(opened, plain), name
        weights = values(*QUERY, seed=1)
        (opened * weights).sum().backward()
        assert torch.equal(tensor.grad, weights), name


def case_upstreams_own_dequantize_cuts_gradients_of_two_classes() -> None:
    carried = {
        n: make(values(*QUERY), requires_grad=True).dequantize().requires_grad for n, make in OPENED_ON_CPU.items()
    }
    assert carried == {
        "Float8Tensor": True,
        "Float8BlockwiseQTensor": True,
        "HybridQuantizedTensor": False,
        "IdentityTensor": False,
    }


def case_opening_an_identity_tensor_leaves_its_data_without_history() -> None:
    plain = values(*QUERY)
    opened = quantized.dequantized(identity(plain, requires_grad=True))
    assert opened.grad_fn is not None
    assert plain.grad_fn is None
    assert not plain.requires_grad


# Keys as they are stored


def stored(name: str, *shape: int, requires_grad: bool = False) -> Any:
    """Return a tensor in one of the layouts of `stored_keys`, of the compiled engine's classes."""
    classes = SimpleNamespace(
        Float8Tensor=engine.Float8Tensor,
        Float8BlockwiseQTensor=Float8BlockwiseQTensor,
        tex=SimpleNamespace(DType=tex.DType),
    )
    return LAYOUTS[name](classes, *shape, requires_grad=requires_grad)


def case_scales_have_the_shapes_that_the_quantizer_says() -> None:
    for name, squares in (("blocks of a row", 1), ("blocks of 128 rows", 2)):
        for shape in (KEY, (131, 3, 1, 300), (1, 1, 1, 128)):
            quantizer = engine.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=squares)
            assert tuple(stored(name, *shape)._rowwise_scale_inv.shape) == tuple(
                quantizer.get_scale_shape(shape, False)
            )


def case_stored_keys_stand_for_the_dequantized_ones_to_the_bit() -> None:
    for name in LAYOUTS:
        for shape in (KEY, (131, 3, 1, 300)):
            tensor = stored(name, *shape)
            keys = transformer_engine_keys.read(tensor)
            assert keys is not None, name
            assert torch.equal(keys.opened(B), tensor.dequantize()), name


def case_numbers_of_the_engines_own_quantizer_are_read() -> None:
    plain = values(*KEY)
    for make in (float8, blockwise):
        keys = transformer_engine_keys.read(make(plain))
        assert keys is not None
        assert torch.equal(keys.opened(B), plain)


def case_recipes_that_the_kernel_cannot_read_are_left_to_dequantize() -> None:
    for name, make in ALL.items():
        is_read = float8_payload.held_by(make(values(*KEY))) is not None
        assert is_read == (name in {"Float8Tensor", "Float8BlockwiseQTensor"}), name


def case_attention_over_a_stored_key_is_that_over_the_dequantized_one_with_its_gradient() -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa

    (replacement,) = attention.OVERLAY.replacements[dsa_sparse_attention.ALL_KEYS]
    make = replacement.make
    placed = seams.replace(dsa, replacement.symbol, lambda f: make(f, dsa), overlay_id=attention.OVERLAY.id)
    indices = torch.tensor([[[0, -1], [0, 1]], [[0, -1], [1, 0]]])
    try:
        for name in LAYOUTS:
            query, key = values(*QUERY).requires_grad_(), stored(name, *KEY, requires_grad=True)
            plain = key.dequantize().detach().requires_grad_()
            with DequantizeCounter() as calls:
                found = getattr(dsa, replacement.symbol)(query, key, indices, 0.1, 512)
            assert calls == [], name
            expected = getattr(dsa, replacement.symbol)(query, plain, indices, 0.1, 512)
            assert torch.equal(found, expected), name
            above = values(*found.shape, seed=3)
            ours = torch.autograd.grad(found, (query, key), above)
            theirs = torch.autograd.grad(expected, (query, plain), above)
            assert all(map(torch.equal, ours, theirs)), name
    finally:
        placed.undo()


# The dispatcher of the real megatron-core


class Recorder:
    """Stand-in for TileLang's autograd function."""

    got: list[tuple[Any, Any]]

    def __init__(self) -> None:
        self.got = []

    def apply(self, query: Any, key: Any, indices: Any, scale: float) -> Any:
        self.got.append((query, key))
        output = (query.float() * key.float()).to(B)[..., :512]
        return output, output[..., 0].float()


def dispatcher() -> Any:
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    return tilelang_dsa


def call(query: Any, key: Any) -> Any:
    return dispatcher().fused_sparse_mla_absorbed(query, key, torch.zeros(2, 2, 64, dtype=torch.int32), 1.0, 512)


class DequantizeCounter:
    """Counts calls of `dequantize` of Float8Tensor, upstream's own as well as ours."""

    def __enter__(self) -> list[int]:
        self.calls: list[int] = []
        self.original = engine.Float8Tensor.dequantize

        def counted(tensor: Any, **options: Any) -> Any:
            self.calls.append(id(tensor))
            return self.original(tensor, **options)

        engine.Float8Tensor.dequantize = counted
        return self.calls

    def __exit__(self, *_: object) -> None:
        engine.Float8Tensor.dequantize = self.original


def record(query: Any, key: Any, *, seam: bool) -> tuple[Any, list[tuple[Any, Any]]]:
    module, recorder = dispatcher(), Recorder()
    part, before = overlay.PARTS[0], module.SparseMLA
    (replacement,) = part.replacements["bf16-guard-fooled"]
    module.SparseMLA = recorder
    placed = None
    try:
        if seam:
            make = replacement.make
            placed = seams.replace(module, replacement.symbol, lambda f: make(f, module), overlay_id=part.id)
        return call(query, key), recorder.got
    finally:
        module.SparseMLA = before
        if placed is not None:
            placed.undo()


def case_upstreams_guard_is_fooled() -> None:
    module = dispatcher()
    query, key = float8(values(*QUERY)), float8(values(*KEY, seed=1))
    assert module._all_bfloat16(query, key)
    output, got = record(query, key, seam=False)
    assert output is not None
    assert [type(tensor) for tensor in got[0]] == [torch.Tensor, torch.Tensor]


def case_the_seam_opens_each_tensor_once_and_changes_no_result() -> None:
    query, key = float8(values(*QUERY)), float8(values(*KEY, seed=1))
    with DequantizeCounter() as without:
        expected, _ = record(query, key, seam=False)
    with DequantizeCounter() as calls:
        output, got = record(query, key, seam=True)
    assert torch.equal(output, expected)
    assert sorted(calls) == sorted([id(query), id(key)]), "each of our two tensors once"
    assert len(without) == 2
    assert len(got) == 1


def case_gradients_reach_the_quantized_tensors_through_the_seam() -> None:
    plain = values(*QUERY).requires_grad_(), values(*KEY, seed=1).requires_grad_()
    expected, _ = record(*plain, seam=False)
    expected.float().sum().backward()
    for name, make in OPENED_ON_CPU.items():
        pair = make(plain[0].detach(), requires_grad=True), make(plain[1].detach(), requires_grad=True)
        output, _ = record(*pair, seam=True)
        assert torch.equal(output, expected), name
        output.float().sum().backward()
        for quantized_tensor, tensor in zip(pair, plain, strict=True):
            assert torch.equal(quantized_tensor.grad, tensor.grad), name


def case_the_witness_sees_the_defect_and_its_end_with_the_engine_loaded() -> None:
    part = overlay.PARTS[0]
    assert part.self_test(dispatcher()).broken


def case_the_indexer_still_hands_a_null_pointer_to_its_kernel() -> None:
    """Outside the seam, and in the newest release: the indexer slices its own query per batch element."""
    module, got = dispatcher(), []

    def kernel(query: Any, key: Any, *_: Any, **__: Any) -> Any:
        got.extend((query, key))
        return torch.zeros(query.size(0), 2, dtype=torch.int32)

    before, module.lighting_indexer_indices = module.lighting_indexer_indices, kernel
    try:
        bounds = torch.zeros(2, dtype=torch.int32), torch.full((2,), 2, dtype=torch.int32)
        query, key = float8(values(2, 1, 4, 64)), float8(values(2, 1, 64))
        module.fused_qk_topk_lighting(query, key, torch.ones(2, 1, 4), 2, *bounds, 8)
    finally:
        module.lighting_indexer_indices = before
    assert [tensor.data_ptr() for tensor in got] == [0, 0]


def main() -> None:
    """Run every case and print its outcome."""
    report = {}
    for name, case in list(globals().items()):
        if not name.startswith("case_"):
            continue
        try:
            case()
            report[name] = "passed"
        except Exception:  # noqa: BLE001 - the report is the point
            report[name] = traceback.format_exc()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
