"""Payloads of Transformer Engine's tensors: exactly the fields that their `dequantize` reads, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fp8_engine
import pytest
import stored_keys
import torch
from stored_keys import BF16, LAYOUTS

from megacpp_overlays.runtime import float8_payload

RELEASES = ["2.8.0", "2.9.0", "2.10.0", "2.13.0", "2.14.1", "2.17.1", "2.18.0", "2.20.2"]
SHAPES = [(6, 2, 1, 300), (131, 3, 1, 576), (64, 1, 1, 128), (5, 200)]

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]  # upstream's own deprecations


@pytest.fixture(scope="module", params=RELEASES)
def engine(request: pytest.FixtureRequest, wheel: Callable[[str, str], Path]) -> Iterator[SimpleNamespace]:
    with fp8_engine.loaded(wheel("transformer-engine", request.param)) as found:
        # Stand-in for the extension's dequantize of Float8Tensor. Some releases have no Python code for it on the CPU.
        found.tex.dequantize = lambda tensor, _: (
            tensor._data.view(torch.float8_e4m3fn).float() * tensor._scale_inv
        ).to(BF16)
        yield found


def opened(payload: float8_payload.Payload) -> torch.Tensor:
    data, scale = payload
    if scale.ndim:
        scale = scale.repeat_interleave(128, dim=-1)[..., : data.size(-1)]
    return (data.view(torch.float8_e4m3fn).float() * scale).to(BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_times_scales_are_the_dequantized_tensor_to_the_bit(
    shape: tuple[int, ...], layout: str, engine: SimpleNamespace
) -> None:
    tensor = LAYOUTS[layout](engine, *shape)

    payload = float8_payload.held_by(tensor)

    assert payload is not None
    assert (payload.data.shape, payload.data.dtype, payload.scale.dtype) == (shape, torch.uint8, torch.float32)
    assert payload.scale.shape == (() if layout == "one scale" else (*shape[:-1], -(-shape[-1] // 128)))
    assert torch.equal(opened(payload), tensor.dequantize(dtype=BF16))


def test_no_number_is_copied(engine: SimpleNamespace) -> None:
    for name, make in LAYOUTS.items():
        tensor = make(engine, 6, 2, 1, 300)
        payload = float8_payload.held_by(tensor)
        assert payload is not None
        held = [each for each in vars(tensor).values() if isinstance(each, torch.Tensor)]
        assert any(payload.data is each for each in held), name
        shares = payload.scale.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in held}
        assert shares or name == "blocks of 128 rows"


def test_views_and_slices_that_stay_quantized_are_read_as_they_are(engine: SimpleNamespace) -> None:
    whole = stored_keys.of_one_scale(engine, 8, 2, 300)
    rows = stored_keys.of_blocks(engine, 12, 300)
    for tensor in (whole[2:7], whole[:, 1], whole.view(8, 2, 1, 300), rows.view(6, 2, 1, 300), rows.detach()):
        payload = float8_payload.held_by(tensor)
        assert payload is not None
        assert torch.equal(opened(payload), tensor.dequantize(dtype=BF16))


def without(name: str) -> Callable[[Any], None]:
    return lambda tensor: delattr(tensor, name)


def holding(**changed: Any) -> Callable[[Any], None]:
    return lambda tensor: [setattr(tensor, name, value) for name, value in changed.items()]


BITS, ONES = torch.zeros(6, 2, 1, 300, dtype=torch.uint8), torch.ones
OTHERWISE = [
    ("one scale", holding(_data=None)),
    ("one scale", without("_data")),
    ("one scale", holding(_data=BITS[:0])),
    ("one scale", holding(_data=BITS.view(torch.float8_e4m3fn))),
    ("one scale", holding(_data=BITS.to("meta"))),
    ("one scale", holding(_data=torch.nn.Parameter(BITS, requires_grad=False))),
    ("one scale", without("_scale_inv")),
    ("one scale", holding(_scale_inv=None)),
    ("one scale", holding(_scale_inv=ONES(2))),
    ("one scale", holding(_scale_inv=ONES(1, 1))),
    ("one scale", holding(_scale_inv=ONES(1).double())),
    ("one scale", without("_fp8_dtype")),
    ("one scale", holding(_fp8_dtype=SimpleNamespace(name="kFloat8E5M2"))),
    ("one scale", holding(_fp8_dtype=0)),
    ("blocks of a row", holding(_rowwise_data=None, _columnwise_data=BITS.view(300, 6, 2, 1))),
    ("blocks of a row", holding(_rowwise_scale_inv=None)),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(3, 11))),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(3, 16))),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(4, 12))),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(12, 3))),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(3, 12, 1))),
    ("blocks of a row", holding(_rowwise_scale_inv=ONES(3, 12).to(torch.uint8))),
    ("blocks of a row", without("_is_2D_scaled")),
    ("blocks of a row", holding(_is_2D_scaled=None)),
    ("blocks of a row", holding(_is_2D_scaled=True)),
    ("blocks of a row", holding(_data_format=SimpleNamespace(name="COMPACT"))),
    ("blocks of a row", holding(_data_format=None)),
    ("blocks of a row", holding(_fp8_dtype=SimpleNamespace(name="kFloat8E5M2"))),
    ("blocks of 128 rows", holding(_is_2D_scaled=False)),
    ("blocks of 128 rows", holding(_rowwise_scale_inv=ONES(2, 4))),
    ("blocks of 128 rows", holding(_rowwise_scale_inv=ONES(1, 8))),
    ("blocks of 128 rows", holding(_rowwise_scale_inv=ONES(1, 2))),
]


@pytest.mark.parametrize(("layout", "change"), OTHERWISE, ids=map(str, range(len(OTHERWISE))))
def test_a_tensor_that_is_stored_in_another_way_is_not_read(
    layout: str, change: Callable[[Any], None], engine: SimpleNamespace
) -> None:
    tensor = LAYOUTS[layout](engine, 6, 2, 1, 300)
    assert float8_payload.held_by(tensor) is not None

    change(tensor)

    assert float8_payload.held_by(tensor) is None


@pytest.mark.parametrize("bits", [BITS[:5], BITS.view(12, 1, 1, 300), BITS[..., :200]], ids=["5", "12", "200"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_another_shape_are_read_only_where_the_tensor_says_it_has_that_shape(
    bits: torch.Tensor, layout: str, engine: SimpleNamespace
) -> None:
    """Newer releases take the shape of a tensor from its payload, and so do our callers."""
    tensor = LAYOUTS[layout](engine, 6, 2, 1, 300)
    setattr(tensor, "_data" if layout == "one scale" else "_rowwise_data", bits)

    payload = float8_payload.held_by(tensor)

    assert payload is None or payload.data.shape == tensor.shape
    assert payload is None or torch.equal(opened(payload), tensor.dequantize(dtype=BF16))


def test_subclasses_other_libraries_and_plain_tensors_are_not_read(engine: SimpleNamespace) -> None:
    class Another(engine.Float8Tensor):  # type: ignore[misc, name-defined]
        """A class whose numbers may have another meaning."""

    tensor = stored_keys.of_one_scale(engine, 6, 2, 1, 300)
    look_alike = SimpleNamespace(**{name: getattr(tensor, name) for name in ("_data", "_scale_inv", "_fp8_dtype")})
    derived = stored_keys.of_one_scale(SimpleNamespace(tex=engine.tex, Float8Tensor=Another), 6, 2, 1, 300)
    for other in (derived, look_alike, tensor.dequantize(dtype=BF16), BITS, None):
        assert float8_payload.held_by(other) is None


def test_where_e4m3_may_have_other_bits_nothing_is_read(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")

    assert float8_payload.held_by(stored_keys.of_one_scale(engine, 6, 2, 1, 300)) is None
