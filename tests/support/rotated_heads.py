"""Rotate queries, keys and values of MLA with upstream's kernels, interpreted, and say as JSON how far that is from PyTorch.

`rotated_heads.py HEADS...`, with TRITON_INTERPRET=1. The clock of a tuner is a stand-in that says of one block after the other, by
turns, that it is the fastest. Without the overlay some of that writes behind a tensor, so this is for the overlay alone.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import megacpp_overlays

import torch  # isort: skip
import megatron.core.fusions.fused_mla_yarn_rope_apply as rope  # isort: skip

TOKENS, PLAIN, ROTATED, VALUE = 3, 4, 8, 4
KERNELS = ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel")


class Clock:
    """Stand-in for the clock of a tuner: one block is the fastest, and the blocks that were tried are recorded."""

    def __init__(self, tuner: Any) -> None:
        self.tuner, self.bench = tuner, tuner._bench
        self.turn = 0
        self.tried: list[tuple[int, int]] = []
        vars(tuner)["_bench"] = self

    def __call__(self, *args: Any, config: Any, **more: Any) -> list[float]:
        self.tried.append((config.kwargs["BLOCK_H"], config.num_warps))
        place = len(self.tried) - 1

        def measured(kernel_call: Any, quantiles: Any) -> list[float]:
            kernel_call()
            return [float((place - self.turn) % 8)] * len(quantiles)

        vars(self.tuner)["do_bench"] = measured
        found: list[float] = self.bench(*args, config=config, **more)
        return found


def rotated(tensor: Any, cos: Any, sin: Any) -> Any:
    left, right = tensor[..., ::2], tensor[..., 1::2]
    half = ROTATED // 2
    return torch.cat(
        [left * cos[..., :half] - right * sin[..., :half], right * cos[..., half:] + left * sin[..., half:]], dim=-1
    )


def far(found: Any, right: Any) -> float:
    return float((found - right).abs().max())


def queries(heads: int, cos: Any, sin: Any) -> float:
    given = torch.randn(TOKENS, 1, heads, PLAIN + ROTATED)
    above = torch.randn_like(given)
    leaf, ours = given.clone().requires_grad_(), given.clone().requires_grad_()
    right = torch.cat([leaf[..., :PLAIN], rotated(leaf[..., PLAIN:], cos, sin)], dim=-1)
    right.backward(above)
    found = rope.fused_apply_mla_rope_for_q(ours.clone(), cos, sin, PLAIN, ROTATED)
    found.backward(above.clone())
    return max(far(found, right), far(ours.grad, leaf.grad))


def keys(heads: int, cos: Any, sin: Any) -> float:
    both, place = torch.randn(TOKENS, 1, heads, PLAIN + VALUE), torch.randn(TOKENS, 1, 1, ROTATED)
    leaves = [both.clone().requires_grad_(), place.clone().requires_grad_()]
    ours = [both.clone().requires_grad_(), place.clone().requires_grad_()]
    key = torch.cat([leaves[0][..., :PLAIN], rotated(leaves[1], cos, sin).expand(-1, -1, heads, -1)], dim=-1)
    right = key, leaves[0][..., PLAIN:]
    above = [torch.randn_like(each) for each in right]
    torch.autograd.backward(right, above)
    found = rope.fused_apply_mla_rope_for_kv(*ours, cos, sin, ROTATED, PLAIN, VALUE)
    torch.autograd.backward(found, above)
    pairs = [
        *zip(found, right, strict=True),
        *((one.grad, other.grad) for one, other in zip(ours, leaves, strict=True)),
    ]
    return max(far(*pair) for pair in pairs)


def main() -> None:
    torch.manual_seed(5)
    tuners = {name: getattr(rope, name) for name in KERNELS}
    clocks = {name: Clock(tuner) for name, tuner in tuners.items()}
    angle = torch.randn(TOKENS, ROTATED // 2).repeat(1, 2).view(TOKENS, 1, 1, ROTATED)
    cos, sin = angle.cos(), angle.sin()
    worst, tried = 0.0, {}
    for heads in map(int, sys.argv[1:]):
        for clock in clocks.values():
            clock.tried.clear()
            clock.turn += 1
        worst = max(worst, queries(heads, cos, sin), keys(heads, cos, sin))
        tried[heads] = {name: clock.tried.copy() for name, clock in clocks.items()}
    threads = [threading.Thread(target=queries, args=(6, cos, sin)) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    left = {name: [tuner.early_config_prune is None, len(tuner.cache)] for name, tuner in tuners.items()}
    (decision,) = {each.decision.value for each in megacpp_overlays.audit().records if "head-blocks" in each.overlay.id}
    megacpp_overlays.undo("mla-rope-head-blocks")
    undone = "launching" not in rope.ApplyMLARotaryEmbQ.forward.__code__.co_name
    sys.stdout.write(json.dumps({"worst": worst, "tried": tried, "left": left, "decision": decision, "undone": undone}))


main()
