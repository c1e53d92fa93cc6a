"""Inputs of Mamba-2's kernels: none reaches over 2**31 elements. Larger ones are copied, split into parts, or refused.

The kernels of mamba-ssm run interpreted, in an interpreter of their own (`long_offsets.py`); how arguments and results are
taken apart and put together is seen here, on functions in plain PyTorch that stand for upstream's.
"""

# ruff: noqa: N803 - they are called with upstream's names

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import warm_python
from places import HANG_S, ROOT, SUPPORT

from megacpp_overlays.feature_probes import mamba2_int32_offsets as feature
from megacpp_overlays.overlays import mamba2_int32_offsets as seams

ROUNDING = 1e-6


@pytest.fixture(scope="module")
def facts() -> Any:
    python = ROOT / ".envs/edge/bin/python"
    assert python.exists(), f"there is no {python}: run `make setup`"
    env = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    process = warm_python.start(
        ["-W", "ignore", SUPPORT / "long_offsets.py"], env, after=warm_python.INTERPRETER, python=python
    )
    out, error = process.communicate(HANG_S)
    assert process.returncode == 0, error[-4000:]
    return json.loads(out)


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("way", "rows"),
    [("rows of a scan", [1] * 4), ("rows of all", [1] * 4), ("views", [2] * 2)],
    ids=lambda each: str(each),
)
def test_real_kernels_have_the_same_results_in_parts_as_at_once(way: str, rows: list[int], facts: Any) -> None:
    assert facts["decisions"] == ["active", "active"]
    assert facts["ways"][way]["rows"] == rows
    assert facts["ways"][way]["same output"]
    assert facts["ways"][way]["far"] < ROUNDING


@pytest.mark.full
@pytest.mark.upstream
def test_one_row_with_too_many_states_is_refused_in_words(facts: Any) -> None:
    assert "index states of one row of 32 tokens" in facts["refused"]
    assert "chunk_size" in facts["refused"]


# In this process

ROWS, TOKENS, HEADS, WIDTH, STATE, CHUNK = 5, 8, 2, 4, 4, 4
OF_A_ROW = TOKENS * HEADS * WIDTH * STATE // CHUNK
"""States, which are also as many as outputs."""


class Upstream:
    """Stand-in for upstream's two passes that records their arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(
        self,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        chunk_size: Any,
        D: Any = None,
        z: Any = None,
        cu_seqlens: Any = None,
    ) -> Any:
        self.calls.append({"x": x, "dt": dt, "B": B, "C": C, "z": z, "D": D})
        outputs = x * dt[..., None] + B.sum(dim=(2, 3))[..., None, None]
        return outputs, None if z is None else outputs * z, A

    def backward(
        self, dout: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, out: Any, chunk_size: Any, z: Any = None,
        dx: Any = None, ddt: Any = None, dB: Any = None, dC: Any = None, dz: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append({"x": x, "dt": dt, "dx": dx, "ddt": ddt})
        results = {"dx": dout * 2, "ddt": dt + 1, "dB": B * 3, "dC": C * 4, "dz": None if z is None else z * 5}
        for name, given in (("dx", dx), ("ddt", ddt), ("dB", dB), ("dC", dC), ("dz", dz)):
            if given is not None:
                results[name] = given.copy_(results[name])
        sums = [dt.sum(dim=(0, 1)), x.sum(dim=(0, 1, 3)), dt.square().sum(dim=(0, 1))]
        return (
            results["dx"], results["ddt"], sums[0], results["dB"], results["dC"], sums[1], results["dz"], sums[2], None
        )  # fmt: skip


def arguments(*, gap: int = 0, rows: int = ROWS) -> dict[str, Any]:
    """Return inputs of a scan; with a gap they are views of one buffer that is so much wider."""
    shapes = {"x": (HEADS, WIDTH), "dt": (HEADS,), "B": (1, STATE), "C": (1, STATE), "z": (HEADS, WIDTH)}
    sizes = [torch.Size(each).numel() for each in shapes.values()]
    numbers = torch.Generator().manual_seed(7)
    wide = torch.randn(rows, TOKENS, sum(sizes) + gap, generator=numbers)
    parts = torch.split(wide, [*sizes, gap], dim=-1) if gap else torch.split(wide, sizes, dim=-1)
    found = {name: part.unflatten(-1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}
    if not gap:
        found = {name: each.contiguous() for name, each in found.items()}
    return {**found, "A": torch.ones(rows, HEADS), "chunk_size": CHUNK}


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


def forward(upstream: Upstream) -> Callable[..., Any]:
    return seams._make_forward(upstream.forward, ModuleType("target"))


def backward(upstream: Upstream) -> Callable[..., Any]:
    return seams._make_backward(upstream.backward, ModuleType("target"))


def test_a_call_that_fits_is_upstream_s_own(upstream: Upstream) -> None:
    given = arguments(gap=50)

    forward(upstream)(**given)
    backward(upstream)(given["x"], out=given["x"], **{name: given[name] for name in given})

    assert all(call[name] is given[name] for call in upstream.calls for name in ("x", "dt"))


def test_a_view_that_reaches_too_far_is_copied_and_nothing_else(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "LIMIT", 10_000)
    given = {**arguments(), "dt": arguments(gap=1000)["dt"]}

    outputs, gated, _ = forward(upstream)(**given)

    [call] = upstream.calls
    assert call["x"] is given["x"]
    assert seams.reach(given["dt"]) >= 10_000 > seams.reach(call["dt"])
    expected = Upstream().forward(**given)
    assert torch.equal(outputs, expected[0])
    assert torch.equal(gated, expected[1])


@pytest.mark.parametrize(("limit", "groups"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2])])
@pytest.mark.parametrize("gap", [0, 1000])
def test_rows_are_taken_as_many_at_a_time_as_fit(
    gap: int, limit: int, groups: list[int], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "LIMIT", limit * OF_A_ROW + 1)
    given = arguments(gap=gap)
    del given["z"]
    given["A"] = torch.ones(HEADS)

    outputs, gated, _ = forward(upstream)(**given)

    assert [call["x"].shape[0] for call in upstream.calls] == groups
    assert all(seams.reach(each) <= seams.LIMIT for call in upstream.calls for each in (call["x"], call["dt"]))
    assert gated is None
    assert torch.equal(outputs, Upstream().forward(**given)[0])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_gradients_of_rows_are_those_of_all_and_given_buffers_are_written(
    limit: int, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(gap=1000)
    given |= {"dout": given["x"], "out": given["x"]}
    buffers = {f"d{name}": each for name, each in arguments(gap=1000).items() if name in {"x", "dt", "z"}}
    expected = Upstream().backward(**given)
    monkeypatch.setattr(seams, "LIMIT", limit * OF_A_ROW + 1)

    found = backward(upstream)(**given, **buffers)

    for place, name in ((0, "dx"), (1, "ddt"), (6, "dz")):
        assert found[place] is buffers[name]
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=20 * ROUNDING)
    assert found[-1] is None
    assert all(seams.reach(call["dx"]) <= seams.LIMIT for call in upstream.calls)


@pytest.mark.parametrize("more", [{}, {"cu_seqlens": torch.arange(40)}])
def test_one_row_that_does_not_fit_is_refused(
    more: dict[str, Any], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "LIMIT", OF_A_ROW + 1 if more else OF_A_ROW)
    given = arguments(rows=1)

    with pytest.raises(RuntimeError, match=r"states.* of one row of 8 tokens, \d+ elements, with 32 bits"):
        forward(upstream)(**given, **more)
    assert upstream.calls == []


def test_backwards_sums_of_tiles_count_as_well(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    x, keys = torch.zeros(1, 64, 64, 1), torch.zeros(1, 64, 1, 1)
    given = {"x": x, "dt": x[..., 0], "B": keys, "C": keys, "A": x[0, 0, :, 0], "chunk_size": 64}
    monkeypatch.setattr(seams, "LIMIT", 64 * 64 * 2)

    forward(upstream)(**given)
    with pytest.raises(RuntimeError, match="gradients of decays of one row"):
        backward(upstream)(dout=x, out=x, **given)


# Rows of the norm


def norm_forward(
    x: Any, weight: Any, bias: Any, eps: float, z: Any = None, out: Any = None, group_size: Any = None,
    norm_before_gate: bool = True, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    grouped = x.unflatten(-1, (-1, group_size))
    mean = None if is_rms_norm else grouped.mean(-1).T.reshape(-1)
    deviation = grouped.std(-1).T.reshape(-1)
    result = x * weight * (1 if z is None else z)
    return (result if out is None else out.copy_(result)), mean, deviation


def norm_backward(
    dy: Any, x: Any, weight: Any, bias: Any, eps: float, mean: Any, rstd: Any, z: Any = None, group_size: Any = None,
    norm_before_gate: bool = True, is_rms_norm: bool = False, recompute_output: bool = False, dz: Any = None, out: Any = None,
) -> Any:  # fmt: skip
    each = rstd.view(-1, x.shape[0]).T.repeat_interleave(group_size, 1)
    if mean is not None:
        each = each + mean.view(-1, x.shape[0]).T.repeat_interleave(group_size, 1)
    gradient = None if z is None else torch.mul(dy, x) * z
    if gradient is not None and dz is not None:
        gradient = dz.copy_(gradient)
    results = (dy * each, (dy * x).sum(0), None if bias is None else dy.sum(0), gradient)
    if not recompute_output:
        return results
    again = x * weight
    return (*results, again if out is None else out.copy_(again))


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_rows_of_the_norm_in_parts_are_those_of_one_launch(
    rms: bool, gated: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(11, 8, generator=numbers) for _ in range(2))
    wide = torch.randn(11, 40, generator=numbers)
    weight = torch.randn(8, generator=numbers)
    z = wide[:, :8] if gated else None
    more = {"z": z, "group_size": 4, "is_rms_norm": rms}
    bias = None if rms else weight
    result, mean, deviation = norm_forward(x, weight, bias, 0.0, **more)
    back = {"recompute_output": given, **more}
    expected = norm_backward(dy, x, weight, bias, 0.0, mean, deviation, **back)
    launches: list[int] = []

    def counted(original: Callable[..., Any], of: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            launches.append((args + tuple(kwargs.values()))[of].shape[0])
            return original(*args, **kwargs)

        call.__signature__ = seams.inspect.signature(original)  # type: ignore[attr-defined]
        return call

    monkeypatch.setattr(seams, "LIMIT", 4 * 40 + 1)
    out = torch.empty(11, 40)[:, 8:16] if given else None
    found = seams._make_norm_forward(counted(norm_forward, 0), ModuleType("target"))(
        x, weight, bias, 0.0, out=out, **more
    )
    assert launches == ([4, 4, 3] if gated or given else [11])
    assert (found[0] is out) == given
    launches.clear()
    gradient = torch.empty(11, 40)[:, :8] if gated and given else None
    slopes = seams._make_norm_backward(counted(norm_backward, 0), ModuleType("target"))(
        dy, x, weight, bias, 0.0, mean, deviation, dz=gradient, **back
    )

    assert launches == ([4, 4, 3] if gated else [11])
    for one, other in zip((*found, *slopes), (result, mean, deviation, *expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


def test_a_norm_of_no_rows_is_upstream_s_own_call() -> None:
    nothing = torch.empty(0, 8)

    def original(x: Any, weight: Any) -> tuple[Any, Any]:
        return x, weight

    assert seams._make_norm_forward(original, ModuleType("target"))(nothing, None) == (nothing, None)


# The witness and the self-test


def scanning() -> ModuleType:
    """Return a module that launches a scan as upstream's host code does."""
    module = ModuleType("scanning")

    def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int) -> None:
        module._chunk_cumsum_fwd(dt, A, chunk_size)
        module._chunk_state_fwd(B, x)

    def back(dout: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, out: Any, chunk_size: int, dB: Any = None, dC: Any = None) -> None:  # fmt: skip
        module._bmm_chunk_fwd(C, B, chunk_size)
        scan(x, dt.clone(), A, B, C, chunk_size)

    steps = dict.fromkeys(("_chunk_cumsum_fwd", "_bmm_chunk_fwd", "_chunk_state_fwd"))
    vars(module).update(steps, **{feature.FORWARD: scan, feature.BACKWARD: back})
    return module


def normalising() -> ModuleType:
    """Return a module that launches rows of a norm as upstream's host code does."""
    module = ModuleType("normalising")

    def norm(
        x: Any, weight: Any, bias: Any, eps: float, z: Any = None, out: Any = None, is_rms_norm: bool = False
    ) -> Any:
        with module.torch.cuda.device(x.device.index):
            module._layer_norm_fwd_1pass_kernel[1](x, x, z)
        return x, None, torch.empty(x.shape[0], device="meta")

    def back(dy: Any, x: Any, weight: Any, bias: Any, eps: float, mean: Any, rstd: Any, z: Any = None, dz: Any = None, is_rms_norm: bool = False) -> Any:  # fmt: skip
        assert module.torch.cuda.get_device_properties(x.device).multi_processor_count
        module._layer_norm_bwd_kernel[1](x, z)
        return x, weight, None, z

    kernels: dict[str, Any] = {"_layer_norm_fwd_1pass_kernel": {}, "_layer_norm_bwd_kernel": {}}
    vars(module).update(kernels, torch=torch, **{feature.NORM_FORWARD: norm, feature.NORM_BACKWARD: back})
    return module


@pytest.mark.parametrize(
    ("make", "observe", "passes"),
    [
        (scanning, seams.observe_scan, {feature.FORWARD: seams._make_forward, feature.BACKWARD: seams._make_backward}),
        (
            normalising,
            seams.observe_norm,
            {feature.NORM_FORWARD: seams._make_norm_forward, feature.NORM_BACKWARD: seams._make_norm_backward},
        ),
    ],
)
def test_the_observation_is_the_reach_of_launches_in_either_pass(make: Any, observe: Any, passes: Any) -> None:
    module = make()
    before = dict(vars(module))
    assert observe(module).broken
    assert vars(module) == before

    for name, seam in passes.items():
        assert observe(module).broken, name
        setattr(module, name, seam(before[name], module))

    assert not observe(module).broken


def test_a_stand_in_for_a_kernel_is_upstream_s_in_another_thread() -> None:
    theirs = {1: "theirs"}
    stand_in = seams._Kernel(theirs, lambda: None)
    stand_in._here = -1

    assert stand_in[1] == "theirs"
