"""The plain scan of packed documents, compared with the recurrence that it computes, step by step, in float64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from places import HANG_S

from megacpp_overlays.kernels.mamba2 import packed_reference as reference

HEADS, DIM, STATE, WIDTH = 4, 3, 5, 4


class Inputs:
    def __init__(self, tokens: int, *, groups: int, wide_d: bool) -> None:
        generator = torch.Generator().manual_seed(tokens + groups)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        channels = HEADS * DIM + 2 * groups * STATE
        self.zxbcdt = normal(2, tokens, HEADS * DIM + channels + HEADS)
        self.weight, self.bias = normal(channels, WIDTH), normal(channels)
        self.dt_bias, self.rates = normal(HEADS), -normal(HEADS).exp()
        self.skip = normal(HEADS, DIM) if wide_d else normal(HEADS)
        self.groups = groups

    def scan(self, seq_idx: torch.Tensor | None = None, rows: slice = slice(None)) -> torch.Tensor:
        return reference.scan(
            self.zxbcdt[:, rows],
            self.weight,
            self.bias,
            self.dt_bias,
            self.rates,
            self.skip,
            headdim=DIM,
            ngroups=self.groups,
            seq_idx=seq_idx,
        )


def recurrence(given: Inputs) -> torch.Tensor:
    """Return the output of a mixer for one document, computed token by token."""
    z, xbc, dt = given.zxbcdt.split([HEADS * DIM, given.weight.shape[0], HEADS], dim=-1)
    tokens = xbc.shape[1]
    padded = F.pad(xbc.transpose(1, 2), (WIDTH - 1, 0))
    convolved = F.silu(F.conv1d(padded, given.weight[:, None], given.bias, groups=given.weight.shape[0]))
    x, b, c = convolved.transpose(1, 2).split([HEADS * DIM, given.groups * STATE, given.groups * STATE], dim=-1)
    x = x.unflatten(-1, (HEADS, DIM))
    group = torch.arange(HEADS) * given.groups // HEADS
    b, c = (each.unflatten(-1, (given.groups, STATE))[:, :, group] for each in (b, c))
    dt = F.softplus(dt + given.dt_bias)
    skip = given.skip if given.skip.dim() == 2 else given.skip[:, None]
    state = torch.zeros(2, HEADS, DIM, STATE, dtype=torch.float64)
    rows = []
    for token in range(tokens):
        decay = (dt[:, token] * given.rates).exp()[..., None, None]
        added = (dt[:, token, :, None] * x[:, token])[..., None] * b[:, token, :, None]
        state = decay * state + added
        rows.append((state * c[:, token, :, None]).sum(-1) + skip * x[:, token])
    return torch.stack(rows, dim=1).flatten(-2) * F.silu(z)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wide_d", [False, True])
def test_one_document_follows_the_recurrence(tokens: int, groups: int, wide_d: bool) -> None:
    given = Inputs(tokens, groups=groups, wide_d=wide_d)

    torch.testing.assert_close(given.scan(), recurrence(given), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [(4, 5), (1, 1, 7), (9,)])
def test_documents_of_a_row_give_the_results_of_each_alone(lengths: tuple[int, ...]) -> None:
    given = Inputs(9, groups=2, wide_d=False)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    alone = [given.scan(rows=slice(start, start + length)) for start, length in zip(starts, lengths, strict=True)]

    torch.testing.assert_close(given.scan(seq_idx), torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)


PROVIDED = """
import sys, torch
from megacpp_overlays.kernels.mamba2 import packed_reference
assert packed_reference.provide_causal_conv1d()
from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
x, dout = (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
weight, bias = torch.randn(3, 4), torch.randn(3)
seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2]] * 2, dtype=torch.int32)
leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
true = packed_reference.convolve(leaves[0].transpose(1, 2), leaves[1], leaves[2], seq_idx).transpose(1, 2)
true.backward(dout)
found = causal_conv1d_fwd_function(x, weight, bias, seq_idx, None, None, True)
assert torch.equal(found, true)
dx = torch.full_like(x, 7.0)
back = causal_conv1d_bwd_function(x, weight, bias, dout, seq_idx, None, None, dx, False, True)
assert back[0] is dx
for one, leaf in zip(back, leaves):
    torch.testing.assert_close(one, leaf.grad)
for wrong in ((x, weight, bias, seq_idx, x, None, True), (x, weight, bias, seq_idx, None, None, False)):
    try:
        causal_conv1d_fwd_function(*wrong)
    except NotImplementedError:
        continue
    raise SystemExit("it was not refused")
"""


def test_the_stand_in_for_causal_conv1d_gives_its_results_and_refuses_other_calls() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", PROVIDED], capture_output=True, text=True, check=False, timeout=HANG_S
    )

    assert done.returncode == 0, done.stderr
