"""Mamba-3's MIMO backward with the overlay: it takes any number of groups. One group and one for each head have upstream's bits."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mamba3_release import ENTRY, IMPORT, add_stand_ins, imported, replace_kernels, unpack

import megacpp_overlays
from megacpp_overlays.feature_probes import mamba3_mimo_gqa_backward as feature
from megacpp_overlays.kernels.mamba3 import mimo_reference as reference
from megacpp_overlays.kernels.mamba3.grouped_head_reduction import sum_groups
from megacpp_overlays.kernels.mamba3.mimo_reference import Inputs
from megacpp_overlays.loader import aliases, seams
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.mamba3_mimo_gqa_backward import FACTORIES, PARTS
from megacpp_overlays.runtime import graph_capture

pytestmark = pytest.mark.upstream

ID = "mamba3-mimo-gqa-backward"
NAMES = ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_o", "angles", "d", "z")
BOUNDS = torch.tensor([0, 3, 4, 12], dtype=torch.int32)
SYMBOLS = (feature.PLAIN.symbol, feature.VARLEN.symbol)
CHUNK = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, because threads of tiny operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_stand_ins(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture(scope="module")
def upstream(release: Path, stand_ins: Path) -> Iterator[ModuleType]:
    """`mamba3_mimo` of the release, as upstream made it but for the kernels."""
    with imported(release, stand_ins) as load:
        entry = load(ENTRY)
        megacpp_overlays.undo(ID)
        replace_kernels(entry)
        yield entry


@pytest.fixture(scope="module")
def patched(release: Path, stand_ins: Path) -> Iterator[ModuleType]:
    """A second copy of the release's module, with the seams."""
    with imported(release, stand_ins) as load:
        entry = load(ENTRY)
        megacpp_overlays.undo(ID)
        install()
        replace_kernels(entry)
        yield entry


def install() -> None:
    """Install the seams in the copy that is imported now."""
    for part in PARTS:
        owner = sys.modules[part.target.module]
        (replacement,) = part.replacements[feature.ONE_OR_ALL]
        make = replacement.make
        seam = seams.replace(
            owner, replacement.symbol, lambda original, make=make, owner=owner: make(original, owner), overlay_id=ID
        )
        aliases.rebind([seam], [], deep=False)


def inputs(
    groups: int, *, heads: int = 8, rank: int = 2, dim: int = 8, sequence: int = 16, dtype: torch.dtype = torch.float64
) -> Inputs:
    generator = torch.Generator().manual_seed(groups)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    dt = torch.nn.functional.softplus(normal(2, heads, sequence) - 2)
    return Inputs(
        q=normal(2, sequence, rank, groups, dim),
        k=normal(2, sequence, rank, groups, dim),
        v=normal(2, sequence, heads, 3),
        adt=-dt * torch.nn.functional.softplus(normal(2, heads, sequence)),
        dt=dt,
        trap=normal(2, heads, sequence),
        q_bias=normal(heads, rank, dim),
        k_bias=normal(heads, rank, dim),
        mimo_v=normal(heads, rank, 3),
        mimo_z=normal(heads, rank, 3),
        mimo_o=normal(heads, rank, 3),
        angles=normal(2, sequence, heads, dim // 4),
        d=normal(heads),
        z=normal(2, sequence, heads, 3),
    )


def arguments(given: Inputs, dout: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of the backward functions before `cu_seqlens`. Our kernels read the log decay from `dA_cs`."""
    q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z = given
    return (
        *(dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, adt, adt, dt, trap, d, adt),
        *(CHUNK, q.shape[-1] // angles.shape[-1], q.dtype),
    )


def backward(entry: ModuleType, symbol: str, given: Inputs, *, bounds: torch.Tensor = BOUNDS) -> tuple[Any, ...]:
    """Return the gradients of an output whose own gradient is always the same, through the name that is called."""
    if symbol == feature.VARLEN.symbol:
        return tuple(getattr(entry, symbol)(*arguments(given, wave(given.v)), cu_seqlens=bounds))
    return tuple(getattr(entry, symbol)(*arguments(given, wave(given.v))))


def wave(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like.numel() + 1, dtype=torch.float64).mul(0.7).sin().view(like.shape).to(like.dtype)


def truth(given: Inputs, lengths: torch.Tensor | None, *, raw_angles: bool = False) -> Inputs:
    """Return float64 gradients through autograd of queries and keys that heads share."""
    wide = Inputs(*(None if each is None else each.detach().double().requires_grad_() for each in given))
    angles = reference.cumulative_angles(wide.angles, wide.dt, lengths) if raw_angles else wide.angles
    out = reference.forward(wide._replace(angles=angles), lengths)
    leaves = [each for each in wide if each is not None]
    found = iter(torch.autograd.grad(out, leaves, wave(given.v).double().expand_as(out)))
    return Inputs(*(None if each is None else next(found) for each in wide))


def assert_near(found: Any, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= tolerance * expected.norm() + 1e-12


# Gradients


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", [None, BOUNDS], ids=["plain", "packed"])
def test_a_layer_trains_with_any_number_of_groups(
    patched: ModuleType, groups: int, lengths: torch.Tensor | None
) -> None:
    given = inputs(groups, sequence=12)
    leaves = Inputs(*(each.clone().requires_grad_() for each in given))  # type: ignore[union-attr]
    expected = truth(given, lengths, raw_angles=True)

    out = patched.mamba3_mimo(*leaves, CHUNK, 4, torch.float64, cu_seqlens=lengths)
    out.backward(wave(given.v))

    for leaf, name in zip(leaves, NAMES, strict=True):
        assert leaf is not None
        assert_near(leaf.grad, getattr(expected, name), 1e-6)


@pytest.mark.parametrize("symbol", SYMBOLS)
@settings(max_examples=15)
@given(
    divided=st.sampled_from([(2, 6), (3, 6), (2, 4), (4, 12), (6, 12), (5, 10)]),
    rank=st.integers(1, 4),
    dim=st.sampled_from([4, 8, 12]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_blocks_of_heads_are_summed_for_every_shape(
    patched: ModuleType, symbol: str, divided: tuple[int, int], rank: int, dim: int, dtype: torch.dtype
) -> None:
    groups, heads = divided
    given = inputs(groups, heads=heads, rank=rank, dim=dim, sequence=12, dtype=dtype)
    lengths = BOUNDS if symbol == feature.VARLEN.symbol else None
    per_head = reference.gradients(given, wave(given.v), lengths)

    found = backward(patched, symbol, given)

    # Gradients per head are rounded to the dtype, then their sum is; biases come from the same rounded ones.
    rounding = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for one, exact in zip(found[:2], (per_head.q, per_head.k), strict=True):
        assert (one.dtype, one.is_contiguous()) == (dtype, True)
        assert_near(one, torch.stack([block.sum(3) for block in exact.chunk(groups, dim=3)], dim=3), rounding)
    for one, exact in zip(found[6:8], (per_head.q, per_head.k), strict=True):
        assert one.dtype == dtype
        assert_near(one, exact.sum((0, 1)).transpose(0, 1), rounding)


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_with_a_copy_of_their_groups_tensor_get_the_same_gradients(
    patched: ModuleType, symbol: str, dtype: torch.dtype
) -> None:
    given = inputs(2, sequence=12, dtype=dtype)
    copies = given._replace(q=reference.of_heads(given.q, 8), k=reference.of_heads(given.k, 8))

    grouped, alone = backward(patched, symbol, given), backward(patched, symbol, copies)

    for one, other in zip(grouped[2:], alone[2:], strict=True):
        assert one.equal(other)
    for one, other in zip(grouped[:2], alone[:2], strict=True):
        assert one.equal(other.float().unflatten(3, (2, 4)).sum(4).to(dtype))


# Calls that stay upstream's


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("groups", [1, 8])
def test_one_group_and_all_groups_are_upstreams_own_bits(
    upstream: ModuleType, patched: ModuleType, symbol: str, groups: int
) -> None:
    given = inputs(groups, sequence=12, dtype=torch.bfloat16)

    found, expected = backward(patched, symbol, given), backward(upstream, symbol, given)

    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert one.equal(other)


def remade(part: Overlay, original: Any) -> Any:
    (replacement,) = part.replacements[feature.ONE_OR_ALL]
    return replacement.make(original, ModuleType("anything"))


def names_behind(entry: ModuleType, symbol: str) -> dict[str, Any]:
    """Return the names of the module in which upstream's function is, seam or not."""
    function = getattr(entry, symbol)
    found: dict[str, Any] = getattr(function, "__wrapped__", function).__globals__
    return found


@pytest.mark.parametrize("part", PARTS, ids=["plain", "varlen"])
@pytest.mark.parametrize("groups", [1, 4, 3])
def test_other_cases_reach_upstream_untouched(patched: ModuleType, part: Overlay, groups: int) -> None:
    seen = []

    def upstreams(dout: Any, q: Any, k: Any, v: Any, *rest: Any, cu_seqlens: Any = None) -> str:
        seen.extend([dout, q, k, v, *rest, cu_seqlens])
        return "upstream's result"

    given = inputs(groups, heads=4, sequence=12)
    passed = arguments(given, wave(given.v))

    assert remade(part, upstreams)(*passed, cu_seqlens=BOUNDS) == "upstream's result"
    assert all(one is other for one, other in zip(seen, [*passed, BOUNDS], strict=True))


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_heads_that_are_not_divisible_still_raise(
    upstream: ModuleType, patched: ModuleType, symbol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for entry in (upstream, patched):
        for name in FACTORIES:  # upstream launches its kernels first, out of bounds
            monkeypatch.setitem(names_behind(entry, symbol), name, lambda *_: lambda *_: None)
        with pytest.raises(ValueError, match="G value of 3 is not currently supported!") as error:
            backward(entry, symbol, inputs(3, heads=4, sequence=12))
        errors.append(str(error.value))

    assert errors[0] == errors[1]


def test_without_lengths_the_packed_variant_hands_on_to_the_plain_one(patched: ModuleType) -> None:
    given = inputs(2)
    passed = arguments(given, wave(given.v))
    expected = getattr(patched, SYMBOLS[0])(*passed)

    for found in (getattr(patched, SYMBOLS[1])(*passed), getattr(patched, SYMBOLS[1])(*passed, cu_seqlens=None)):
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_arguments_may_be_given_by_name_or_by_place(patched: ModuleType) -> None:
    given = inputs(2, sequence=12)
    passed = arguments(given, wave(given.v))
    names = ("dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "z", "mimo_z", "angles", "dA_cs")
    names += ("dA_cs_rev", "dt", "trap", "D", "segsum", "chunk_size", "rotary_dim_divisor", "dtype")
    expected = backward(patched, SYMBOLS[1], given)
    packed = getattr(patched, SYMBOLS[1])

    for found in (packed(*passed, BOUNDS, 64), packed(**dict(zip(names, passed, strict=True)), cu_seqlens=BOUNDS)):
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("left_out", ["z", "d", "mimo_o"])
def test_an_argument_that_a_layer_leaves_out_has_no_gradient(patched: ModuleType, left_out: str) -> None:
    given = inputs(2)._replace(**{left_out: None})
    given = given._replace(mimo_z=None) if left_out == "z" else given
    dout = wave(reference.forward(given))
    per_head = reference.gradients(given, dout)

    found = getattr(patched, SYMBOLS[0])(*arguments(given, dout))

    assert found[NAMES.index(left_out)] is None
    assert_near(found[0], sum_groups(per_head.q, 2), 1e-6)


def test_a_gate_that_is_applied_later_leaves_its_projection_without_a_gradient(patched: ModuleType) -> None:
    given = inputs(2)._replace(z=None)  # as Mamba3(is_outproj_norm=True) calls it

    found = backward(patched, SYMBOLS[0], given)

    assert found[NAMES.index("z")] is None
    assert found[NAMES.index("mimo_z")] is None


# Running


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_kernels_are_launched_with_the_very_queries_and_keys(
    patched: ModuleType, symbol: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    for name in FACTORIES:
        monkeypatch.setitem(names_behind(patched, symbol), name, lambda *_: lambda *tensors: seen.append(tensors))
    given = inputs(groups, sequence=12)

    backward(patched, symbol, given)

    assert len(seen) == 2
    for tensors in seen:
        assert tensors[1] is given.q
        assert tensors[2] is given.k


def test_a_kernel_that_is_not_launched_with_queries_and_keys_is_refused(
    patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host(dout: Any, q: Any, k: Any, v: Any) -> Any:
        return mamba_mimo_bwd_fwd()(q, k.contiguous())  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setitem(host.__globals__, "mamba_mimo_bwd_fwd", lambda: lambda *_: None)
    monkeypatch.setitem(host.__globals__, "mamba_mimo_bwd_bwd", lambda: lambda *_: None)
    given = inputs(2)

    with pytest.raises(RuntimeError, match="not launched with q and k, each of them once"):
        remade(PARTS[0], host)(wave(given.v), given.q, given.k, given.v)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_the_sums_read_nothing_from_the_device(
    patched: ModuleType, symbol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FACTORIES:
        monkeypatch.setitem(names_behind(patched, symbol), name, lambda *_: lambda *_: None)
    given = inputs(2, sequence=12)

    with graph_capture.host_reads() as read:
        backward(patched, symbol, given)

    assert read == []


def test_threads_do_not_disturb_each_other(patched: ModuleType) -> None:
    cases = [(symbol, inputs(groups, sequence=12)) for symbol in SYMBOLS for groups in (1, 2, 4, 8)]
    expected = [backward(patched, symbol, given) for symbol, given in cases]
    wrong: list[int] = []

    def work(number: int) -> None:
        symbol, given = cases[number]
        for _ in range(5):
            found = backward(patched, symbol, given)
            if not all(one.equal(other) for one, other in zip(found, expected[number], strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_nothing_of_the_module_is_changed_by_a_call(patched: ModuleType, symbol: str) -> None:
    before = dict(names_behind(patched, symbol))

    backward(patched, symbol, inputs(2, sequence=12))

    assert names_behind(patched, symbol) == before


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_a_compiled_layer_computes_the_same(patched: ModuleType) -> None:
    given = inputs(2)
    leaves = [each.clone().requires_grad_() for each in given if each is not None]
    layer = torch.compile(lambda *tensors: patched.mamba3_mimo(*tensors, CHUNK, 4, torch.float64), backend="eager")
    expected = truth(given, None, raw_angles=True)

    layer(*leaves).backward(wave(given.v))

    for leaf, name in zip(leaves, NAMES, strict=True):
        assert_near(leaf.grad, getattr(expected, name), 1e-6)


# The sum


def test_half_precision_is_added_up_in_float32() -> None:
    ones = torch.ones(1, 1, 1, 1024, 2, dtype=torch.bfloat16)  # in bfloat16, 256 + 1 is 256

    assert sum_groups(ones, 2).tolist() == [[[[[512.0] * 2] * 2]]]


@settings(max_examples=30)
@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 16),
    dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
)
def test_a_sum_is_the_float32_sum_rounded_once(groups: int, size: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    per_head = torch.randn(1, 3, 2, groups * size, dim, generator=generator).to(dtype)
    exact = torch.stack([block.double().sum(3) for block in per_head.chunk(groups, dim=3)], dim=3)
    sizes = torch.stack([block.double().abs().sum(3) for block in per_head.chunk(groups, dim=3)], dim=3)

    found = sum_groups(per_head, groups)

    assert (found.shape, found.dtype, found.is_contiguous()) == (exact.shape, dtype, True)
    rounding = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= exact.abs() * rounding + sizes * 2**-21 + 2**-25).all()


def test_one_group_is_the_sum_that_upstream_takes() -> None:
    per_head = torch.randn(2, 5, 2, 6, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    assert sum_groups(per_head, 1).equal(per_head.sum(dim=3, keepdim=True))


def test_heads_that_are_not_divisible_are_refused() -> None:
    with pytest.raises(ValueError, match="4 heads are not divisible by 3 groups"):
        sum_groups(torch.zeros(1, 1, 1, 4, 1), 3)


# The reference


def stepwise(given: Inputs, lengths: list[int]) -> torch.Tensor:
    """Return the output of a layer from its recurrence, one step after the other, one head after the other."""
    heads, out = given.v.shape[2], torch.zeros_like(given.v)
    share = torch.sigmoid(given.trap)
    for batch in range(given.v.shape[0]):
        for head in range(heads):
            group = head // (heads // given.q.shape[3])
            state, before = torch.zeros(given.q.shape[-1], given.v.shape[-1], dtype=given.v.dtype), None
            for step in range(given.v.shape[1]):
                if step in lengths:
                    state, before = torch.zeros_like(state), None
                turn = given.angles[batch, step, head]
                query = turned(given.q[batch, step, :, group] + given.q_bias[head], turn)
                key = turned(given.k[batch, step, :, group] + given.k_bias[head], turn)
                value = given.v[batch, step, head] * given.mimo_v[head]
                dt, decay = given.dt[batch, head, step], given.adt[batch, head, step].exp()
                state = decay * state
                if before is not None:
                    state = state + (1 - share[batch, head, step]) * dt * decay * before
                before = key.T @ value
                state = state + share[batch, head, step] * dt * before
                ranks = query @ state
                assert given.d is not None
                ranks = ranks + given.d[head] * value
                assert given.z is not None
                assert given.mimo_z is not None
                assert given.mimo_o is not None
                gate = given.z[batch, step, head] * given.mimo_z[head]
                out[batch, step, head] = (ranks * gate * torch.sigmoid(gate) * given.mimo_o[head]).sum(0)
    return out


def turned(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (n, N/2 + n) for which there is an angle, by complex numbers."""
    half, count = vectors.shape[-1] // 2, angles.shape[-1]
    pairs = torch.complex(vectors[..., :half], vectors[..., half:])
    factors = torch.polar(torch.ones(half, dtype=angles.dtype), torch.nn.functional.pad(angles, (0, half - count)))
    return torch.cat([(pairs * factors).real, (pairs * factors).imag], dim=-1)


@pytest.mark.parametrize("lengths", [None, BOUNDS], ids=["one sequence", "packed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_reference_is_the_recurrence(groups: int, lengths: torch.Tensor | None) -> None:
    given = inputs(groups, heads=4, sequence=12)

    found = reference.forward(given, lengths)

    torch.testing.assert_close(found, stepwise(given, [] if lengths is None else lengths.tolist()))


def test_rotations_add_up_and_begin_anew_with_each_sequence() -> None:
    raw, dt = torch.full((1, 4, 1, 1), 50.0), torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])

    whole, packed = (reference.cumulative_angles(raw, dt, each) for each in (None, torch.tensor([0, 2, 4])))

    torch.testing.assert_close(whole.flatten() / math.pi, torch.tensor([1.0, 3.0, 6.0, 10.0]))
    torch.testing.assert_close(packed.flatten() / math.pi, torch.tensor([1.0, 3.0, 3.0, 7.0]))


# Installing


@pytest.mark.parametrize("part", PARTS, ids=["plain", "varlen"])
def test_the_witness_sees_the_error_and_the_self_test_sees_none(
    upstream: ModuleType, patched: ModuleType, part: Overlay
) -> None:
    assert part.witness is not None
    before, after = namespace_of(upstream, part), namespace_of(patched, part)

    seen = part.witness(before)
    assert seen.broken
    assert seen.seen == "G = 1: right; G = 2: G value of 2 is not currently supported!; G = 4: right"
    assert part.self_test(after) == (False, "2 groups of 4 heads: right")


def namespace_of(entry: ModuleType, part: Overlay) -> ModuleType:
    """Return a module with the names of a part's target, which may be gone from `sys.modules`."""
    module = ModuleType(part.target.module)
    vars(module).update(names_behind(entry, part.target.symbol))
    return module


def test_the_witness_does_not_agree_where_gradients_are_summed_otherwise(upstream: ModuleType) -> None:
    module = namespace_of(upstream, PARTS[0])

    def host(dout: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
        if q.shape[3] == 2:
            raise ValueError("G value of 2 is not currently supported!")
        return (torch.zeros(1), *[torch.zeros(1)] * 13)

    vars(module)[PARTS[0].target.symbol] = host
    assert PARTS[0].witness is not None
    seen = PARTS[0].witness(module)

    assert not seen.broken
    assert "G = 1: dq is not the sum over the heads of a group" in seen.seen


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda found: (found[1], found[0], *found[2:]), "dq is not the sum over the heads of a group"),
        (lambda found: (*found[:6], found[7], found[6], *found[8:]), "dq_bias is not the sum"),
        (lambda found: (*found, None), "15 results"),
    ],
)
def test_the_self_test_refuses_wrong_results(patched: ModuleType, spoil: Any, says: str) -> None:
    module = namespace_of(patched, PARTS[0])
    entry = getattr(patched, PARTS[0].target.symbol)
    vars(module)[PARTS[0].target.symbol] = lambda *given: spoil(entry(*given))

    seen = PARTS[0].self_test(module)

    assert seen.broken
    assert says in seen.seen


def test_the_self_test_refuses_kernels_that_get_something_else(patched: ModuleType) -> None:
    module = namespace_of(patched, PARTS[0])
    entry = getattr(patched, PARTS[0].target.symbol)
    vars(module)[PARTS[0].target.symbol] = lambda dout, q, *given: entry(dout, q.clone(), *given)

    assert PARTS[0].self_test(module) == (True, "the kernels are not launched with q and k")


REPORT = """
load("mamba3_mimo")
names = ("mamba3_mimo", "mamba3_mimo_bwd", "mamba3_mimo_bwd_varlen")
held = [vars(load(name)).get(symbol) for name in names for symbol in (
    "mamba_mimo_bwd_combined", "mamba_mimo_bwd_combined_varlen")]
print(sum(hasattr(each, "__wrapped__") for each in held if each), "of", sum(each is not None for each in held))
print(sorted({r.decision.value for r in megacpp_overlays.audit().records if r.overlay.id == "mamba3-mimo-gqa-backward"}))
import torch
print(torch.cuda.is_initialized())
"""


def test_every_live_name_leads_to_the_seam(release: Path, stand_ins: Path, run_python: Any) -> None:
    code = f"import megacpp_overlays\n{IMPORT}{REPORT}"

    said = run_python(code, release, stand_ins, MEGACPP_OVERLAYS_LOG="logging").stdout.splitlines()

    assert said == ["5 of 5", "['active']", "False"]


# The reproducer


@pytest.mark.parametrize("name", ["plain-cpu", "varlen-cpu"])
def test_the_reproducer_measures_the_defect_and_its_repair(name: str, release: Path, stand_ins: Path) -> None:
    from mamba3_mimo_numbers import reproducer

    pack = reproducer()
    (case,) = (case for case in pack.CASES if case.name == name)
    with imported(release, stand_ins):
        pack._import(ENTRY, reference.kernels())
        megacpp_overlays.undo(ID)
        broken = case.run()
        install()
        repaired = case.run()

    assert not repaired.broken, repaired.seen
    assert "G = 2: 14 gradients within" in repaired.seen
    assert broken.broken
    assert "G = 1: 14 gradients within" in broken.seen
    assert "G = 2: G value of 2 is not currently supported!" in broken.seen
