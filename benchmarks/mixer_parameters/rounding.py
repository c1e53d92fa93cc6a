"""Effects of rounding A_log and D to bf16 on a state-space recurrence, in float64 on the CPU.

decay      how far a decay rate moves, for the values that Megatron's constructor draws
outputs    how far the outputs of a whole recurrence move, compared with the effect of rounding its inputs to bf16
updates    the loss of an optimizer with fp32 copies (only the rounding at use), and of one without them
"""

from __future__ import annotations

from typing import Any

HEADS = 4096
LENGTHS = (64, 512, 2048)
LR, STEPS = 1e-4, 1000


def _bf16(values: Any) -> Any:
    import torch

    return values.to(torch.bfloat16).double()


def measure() -> dict[str, Any]:
    """Return the three sections."""
    import torch

    torch.manual_seed(1)
    return {"decay": decay(), "outputs": [outputs(length) for length in LENGTHS], "updates": updates()}


def decay() -> dict[str, Any]:
    """Return by how much -exp(A_log) and the remainder of a state move, relative and absolute.

    Source of the values: MambaMixer draws A from 1 to 16 and keeps its logarithm (megatron-core 0.19.2).
    """
    import torch

    a_log = torch.log(torch.empty(HEADS).uniform_(1, 16)).double()
    rate, rounded = torch.exp(a_log), torch.exp(_bf16(a_log))
    relative = (rounded / rate - 1).abs()
    time = torch.logspace(-3, 1, 200, dtype=torch.float64)[:, None] / rate  # in units of 1 / rate
    left = (torch.exp(-rounded * time) - torch.exp(-rate * time)).abs()
    return {
        "heads": HEADS,
        "rate, root mean square": float(relative.pow(2).mean().sqrt()),
        "rate, largest": float(relative.max()),
        "left of a state, largest": float(left.max()),
    }


def outputs(length: int, *, heads: int = 64, width: int = 4, state: int = 16) -> dict[str, Any]:
    """Return relative root mean square errors of the outputs of h = exp(dt A) h + dt B x, y = C h + D x.

    Args:
        length: tokens.
        heads: with a decay rate and a time step each, as Megatron draws them.
        width: channels of a head.
        state: size of the state.
    """
    import torch

    a_log = torch.log(torch.empty(heads).uniform_(1, 16)).double()
    d = 1 + 0.25 * torch.randn(heads).double()
    dt = torch.exp(torch.empty(length, heads).uniform_(-6.9078, -2.3026).double())  # 0.001 to 0.1
    x, b, c = (torch.randn(length, *shape).double() for shape in ((heads, width), (state,), (state,)))

    def run(a_log: Any, d: Any, dt: Any, x: Any, b: Any, c: Any) -> Any:
        held, found = torch.zeros(heads, width, state, dtype=torch.float64), []
        for t in range(length):
            keep = torch.exp(-torch.exp(a_log) * dt[t])
            held = held * keep[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t]
            found.append(held @ c[t] + d[:, None] * x[t])
        return torch.stack(found)

    exact = run(a_log, d, dt, x, b, c)

    def error(*inputs: Any) -> float:
        return float((run(*inputs) - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    return {
        "length": length,
        "A_log in bf16": error(_bf16(a_log), d, dt, x, b, c),
        "D in bf16": error(a_log, _bf16(d), dt, x, b, c),
        "both in bf16": error(_bf16(a_log), _bf16(d), dt, x, b, c),
        "x, B, C and dt in bf16": error(a_log, d, _bf16(dt), _bf16(x), _bf16(b), _bf16(c)),
    }


def updates() -> dict[str, Any]:
    """Return where A_log is after Adam's steps under one drift of the gradient, and how often the used value changed."""
    import torch

    start = torch.log(torch.empty(256).uniform_(1, 16))

    def train(values: Any, *, copies: bool) -> tuple[Any, int]:
        main = torch.nn.Parameter(values.clone() if copies else values.to(torch.bfloat16))
        optimizer = torch.optim.Adam([main], lr=LR)
        used, changes = main.detach().to(torch.bfloat16), 0
        generator = torch.Generator().manual_seed(2)
        for _ in range(STEPS):
            main.grad = (0.5 + torch.randn(len(values), generator=generator)).to(main.dtype)
            optimizer.step()
            now = main.detach().to(torch.bfloat16)
            changes, used = changes + int((now != used).sum()), now
        return main.detach().double(), changes

    fp32, changes = train(start, copies=True)
    alone, _ = train(start, copies=False)
    return {
        "steps": STEPS,
        "learning rate": LR,
        "moved in fp32": float((fp32 - start.double()).abs().mean()),
        "used value off by, largest": float((_bf16(fp32) - fp32).abs().max()),
        "changes of a used value": changes / len(start),
        "moved without fp32 copies": float((alone - _bf16(start)).abs().mean()),
    }
