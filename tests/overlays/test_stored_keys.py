"""Keys that Transformer Engine quantized, passed to the kernel as they are stored: results have the bits of the dequantized key.

The tensor classes are those of 2.20.2, without their compiled half; `fp8_engine_cases.py` has the compiled one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fp8_engine
import pytest
import stored_keys
import torch
from absorbed_attention import BATCH, HEADS, KEYS, MASKS, ROWS, SCALE, attention_of, choices, numbers
from dsa_source import install, module_of
from fp8_dispatch import Kernel, kernel_in
from stored_keys import BF16, LAYOUTS

from megacpp_overlays import fp8_sparse_mla
from megacpp_overlays.feature_probes import dsa_sparse_attention, fp8_quantized_unwrap, sparse_mla_dimensions
from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
from megacpp_overlays.kernels.sparse_attention import transformer_engine_keys
from megacpp_overlays.overlays import fp8_quantized_unwrap as fp8
from megacpp_overlays.overlays.dsa_sparse_attention import OVERLAY as ATTENTION
from megacpp_overlays.overlays.sparse_mla_dimensions import OVERLAY as DIMENSIONS
from megacpp_overlays.source.file_trees import ArchiveTree

DIM, VALUE = 300, 200
SHAPE = (KEYS, BATCH, 1, DIM)
Wheel = Callable[[str, str], Path]

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.filterwarnings("ignore"),  # upstream's own deprecations
]


@pytest.fixture
def attention(wheel: Wheel) -> Any:
    """The function of pack 47, with its seam."""
    module = attention_of(wheel("megatron-core", "0.19.2"))
    install(ATTENTION, dsa_sparse_attention.ALL_KEYS, module)
    return getattr(module, dsa_sparse_attention.FUNCTION)


@pytest.fixture
def backend(wheel: Wheel) -> ModuleType:
    """The backend of pack 02, with its seam and without TileLang."""
    module = module_of(ArchiveTree(wheel("megatron-core", "0.19.2")), sparse_mla_dimensions.TARGET.module)
    vars(module)["SparseMLA"] = None
    install(DIMENSIONS, sparse_mla_dimensions.ONE_KERNEL, module)
    return module


@pytest.fixture(scope="module")
def engine(wheel: Wheel) -> Iterator[SimpleNamespace]:
    with fp8_engine.loaded(wheel("transformer-engine", "2.20.2")) as found:
        yield found


@pytest.fixture
def opened(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors that were dequantized, by any caller."""
    found: list[Any] = []
    for cls in (engine.Float8Tensor, engine.Float8BlockwiseQTensor):

        def counted(tensor: Any, *, own: Any = cls.dequantize, **options: Any) -> Any:
            found.append(tensor)
            return own(tensor, **options)

        monkeypatch.setattr(cls, "dequantize", counted)
    return found


def query() -> Any:
    return numbers(ROWS, BATCH, HEADS, DIM, dtype=BF16).requires_grad_()


def with_gradients(call: Callable[..., Any], leaves: list[Any], *given: Any, **masks: Any) -> list[Any]:
    output = call(*leaves, *given, **masks)
    return [output.detach(), *torch.autograd.grad(output, leaves, numbers(*output.shape, seed=9, dtype=BF16))]


def unread(engine: SimpleNamespace, *, requires_grad: bool = False) -> Any:
    """Return a quantized key that is dequantized: its numbers are not E4M3."""
    tensor = stored_keys.of_one_scale(engine, *SHAPE, requires_grad=requires_grad)
    tensor._fp8_dtype = engine.tex.DType.kFloat8E5M2
    return tensor


# As it is stored


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_key_gives_the_bits_of_the_dequantized_one_and_is_never_dequantized(
    layout: str, masks: dict[str, Any], attention: Any, engine: SimpleNamespace, opened: list[Any]
) -> None:
    asked, key = query(), LAYOUTS[layout](engine, *SHAPE, requires_grad=True)
    plain = key.dequantize().detach().requires_grad_()
    opened.clear()

    found = with_gradients(attention, [asked, key], choices(), SCALE, VALUE, **masks)

    expected = with_gradients(attention, [asked, plain], choices(), SCALE, VALUE, **masks)
    assert opened == []
    assert [type(each) for each in found] == [torch.Tensor] * 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_that_the_backend_declines_are_served_from_a_stored_key(
    layout: str, backend: ModuleType, engine: SimpleNamespace, opened: list[Any]
) -> None:
    call = getattr(backend, sparse_mla_dimensions.FUNCTION)
    asked, key = query(), LAYOUTS[layout](engine, *SHAPE, requires_grad=True)
    plain = key.dequantize().detach().requires_grad_()
    opened.clear()

    found = with_gradients(call, [asked, key], choices(), SCALE, VALUE)

    expected = with_gradients(call, [asked, plain], choices(), SCALE, VALUE)
    assert opened == []
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_gradient_is_added_up_where_a_leaf_keeps_it(attention: Any, engine: SimpleNamespace) -> None:
    key = stored_keys.of_blocks(engine, *SHAPE, requires_grad=True)
    plain = key.dequantize().detach().requires_grad_()

    for leaf in (key, plain):
        for _ in range(2):
            attention(query(), leaf, choices(), SCALE, VALUE).float().square().sum().backward()

    assert key.grad.count_nonzero() > 0
    assert torch.equal(key.grad, plain.grad)


def test_the_gradient_goes_on_to_the_tensor_that_the_key_is_a_view_of(attention: Any, engine: SimpleNamespace) -> None:
    rows = stored_keys.of_one_scale(engine, KEYS, BATCH, DIM, requires_grad=True)

    attention(query(), rows.view(SHAPE), choices(), SCALE, VALUE).float().sum().backward()

    assert rows.grad.shape == rows.shape
    assert rows.grad.count_nonzero() > 0


@pytest.mark.parametrize("grad", [True, False])
def test_a_key_that_learns_nothing_leaves_the_query_its_gradient(
    grad: bool, attention: Any, engine: SimpleNamespace
) -> None:
    with torch.set_grad_enabled(grad):
        output = attention(query(), stored_keys.of_one_scale(engine, *SHAPE), choices(), SCALE, VALUE)

    assert output.requires_grad is grad


def test_a_quantized_query_is_dequantized_once_with_a_stored_key(
    attention: Any, backend: ModuleType, engine: SimpleNamespace, opened: list[Any]
) -> None:
    for call in (attention, getattr(backend, sparse_mla_dimensions.FUNCTION)):
        pair = [
            stored_keys.of_one_scale(engine, ROWS, BATCH, HEADS, DIM, requires_grad=True),
            stored_keys.of_blocks(engine, *SHAPE, requires_grad=True),
        ]
        plain = [each.dequantize().detach().requires_grad_() for each in pair]
        opened.clear()

        found = with_gradients(call, pair, choices(), SCALE, VALUE)

        assert len(opened) == 1
        assert opened[0] is pair[0]
        expected = with_gradients(call, plain, choices(), SCALE, VALUE)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# Dequantized, as before


def test_a_key_that_is_not_known_is_dequantized_once(
    attention: Any, engine: SimpleNamespace, opened: list[Any]
) -> None:
    asked, key = query(), unread(engine, requires_grad=True)
    plain = key.dequantize().detach().requires_grad_()
    opened.clear()

    found = with_gradients(attention, [asked, key], choices(), SCALE, VALUE)

    assert len(opened) == 1
    expected = with_gradients(attention, [asked, plain], choices(), SCALE, VALUE)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_upstreams_function_gets_a_plain_key(attention: Any, engine: SimpleNamespace, opened: list[Any]) -> None:
    one_bound = {"varlen_starts": torch.zeros(1, dtype=torch.int64), "varlen_ends": torch.full((1,), KEYS)}
    key = stored_keys.of_one_scale(engine, *SHAPE)
    plain = key.dequantize()
    opened.clear()

    found = attention(query(), key, choices(), SCALE, VALUE, **one_bound)

    assert len(opened) == 1
    assert torch.equal(found, attention(query(), plain, choices(), SCALE, VALUE, **one_bound))


def test_the_backend_declines_unreadable_calls_as_before(
    backend: ModuleType, engine: SimpleNamespace, opened: list[Any]
) -> None:
    call = getattr(backend, sparse_mla_dimensions.FUNCTION)
    key = stored_keys.of_one_scale(engine, *SHAPE)
    quantized_query = stored_keys.of_one_scale(engine, ROWS, BATCH, HEADS, DIM)
    for changed in (
        {"key": unread(engine)},
        {"key": numbers(*SHAPE, dtype=BF16), "query": quantized_query},
        {"key": stored_keys.of_one_scale(engine, KEYS, BATCH, DIM)},
        {"key": stored_keys.of_one_scale(engine, KEYS, BATCH, 2, DIM)},
        {"key": stored_keys.of_one_scale(engine, KEYS, BATCH, 1, DIM + 1)},
        {"query": query().half()},
        {"query": query().float()},
        {"topk_indices": choices()[:, 1:]},
        {"v_channels": DIM + 1},
    ):
        given = {"query": query(), "key": key, "topk_indices": choices(), "softmax_scale": SCALE, "v_channels": VALUE}
        assert call(**given) is not None
        assert call(**{**given, **changed}) is None
    assert opened == []


# Behind the seam of pack 03


@pytest.fixture
def dispatcher(backend: ModuleType) -> Any:
    part = next(part for part in fp8.PARTS if part.target.module == sparse_mla_dimensions.TARGET.module)
    install(part, fp8_quantized_unwrap.GUARD_FOOLED, backend)
    return getattr(backend, part.target.symbol)


def test_registered_the_kernel_gets_a_stored_key_before_tilelang_does(
    dispatcher: Any,
    backend: ModuleType,
    engine: SimpleNamespace,
    opened: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("megacpp_overlays"), "propagate", True)
    asked = numbers(ROWS, BATCH, 16, 576, dtype=BF16)
    key = stored_keys.of_blocks(engine, KEYS, BATCH, 1, 576)
    chosen = torch.nn.functional.pad(choices(), (0, 64 - choices().size(-1)), value=-1)
    forget = fp8_sparse_mla.register(transformer_engine_keys.attend)
    try:
        with kernel_in(backend, Kernel()) as kernel:
            found = dispatcher(asked, key, chosen, SCALE, 512)
            assert opened == []
            assert kernel.got == []
            assert "handed as it is to megacpp_overlays.kernels.sparse_attention.transformer_engine_keys" in caplog.text
            expected, _ = sparse_attention.attend(asked, key.dequantize(), chosen, SCALE, 512)
    finally:
        forget()

    assert torch.equal(found, expected)


def test_registered_it_declines_a_key_that_it_cannot_read_which_is_then_dequantized(
    dispatcher: Any, backend: ModuleType, engine: SimpleNamespace, opened: list[Any]
) -> None:
    forget = fp8_sparse_mla.register(transformer_engine_keys.attend)
    try:
        with kernel_in(backend, Kernel()):
            assert dispatcher(query(), unread(engine), choices(), SCALE, VALUE) is None
    finally:
        forget()

    assert len(opened) == 1
