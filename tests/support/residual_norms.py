"""Recomputed functions of a release of Megatron that return their input, with the overlay and without it, as JSON.

A case is run in a fork, since upstream's memory errors end a process: it says whether outputs and gradients are those without recompute, bit
by bit, or how the process ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import megacpp_overlays

RANDOM = "megatron.core.tensor_parallel.random"
OVERLAY = "residual-norm-recompute-alias"
STORAGE = "RESIDUAL_NORMS_STORAGE"
"""The variable that says `copied` where upstream is not to compile its extension, which takes half a minute."""
TOKENS, BATCH, HIDDEN = 64, 2, 32


class ResidualNorm(torch.autograd.Function):
    """An RMS norm of x, [..., d], by a weight, [d], that also returns x, as Transformer Engine's fused one does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight, x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = gradients
        x, weight, scale = ctx.saved_tensors
        straight, weighted = x * scale, normed * weight
        along = (weighted * straight).mean(-1, keepdim=True)
        return (weighted - straight * along) * scale + residual, (normed * straight).flatten(0, -2).sum(0)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def norm_first(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return ResidualNorm.apply(x, weight)


def norm_last(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    normed, residual = ResidualNorm.apply(x, weight)
    return residual, normed


def part_of_the_input(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    weighted = x * weight
    return weighted, x[1:], weighted.exp()


def the_input_alone(x: Tensor, _weight: Tensor) -> Tensor:
    return x


def nothing_of_the_input(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    weighted = x * weight
    return weighted, weighted.sin()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (norm_first, norm_last, part_of_the_input, the_input_alone, nothing_of_the_input)
}


def after_a_function(function: Callable[..., Any], *, recomputed: bool) -> list[Tensor]:
    """Return the output of two layers that use every output of a function, and the gradients of everything."""
    weight, mixing, given = drawn(HIDDEN, seed=1), drawn(HIDDEN, HIDDEN, seed=2), drawn(TOKENS, HIDDEN, seed=3)
    states = given
    for _ in range(2):
        states = states * 1.5
        owner = states.untyped_storage()._cdata
        if recomputed:
            checkpoint = importlib.import_module(RANDOM).CheckpointWithoutOutput(fp8=None)
            outputs = checkpoint.checkpoint(lambda x: function(x, weight), states)
        else:
            outputs = function(states, weight)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        found = [(each @ mixing).sin() for each in outputs]
        mixed = sum(each if len(each) == TOKENS else each.sum(0) for each in found)
        if recomputed:
            checkpoint.discard_output_and_register_recompute(mixed)
        later = [each.mean(-1, keepdim=True) for each in outputs if each.untyped_storage()._cdata == owner]
        states = mixed + sum(each if len(each) == TOKENS else each.sum() for each in later)
    states.square().mean().backward()
    return [states, *(each.grad for each in (weight, mixing, given) if each.grad is not None)]


def after_a_layer(*, recomputed: bool) -> list[Tensor]:
    """Return the output of two real transformer layers with such norms, and the gradients of everything."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Norm(torch.nn.Module):
        returns_residual = True

        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return ResidualNorm.apply(x, self.weight)

    class Attention(torch.nn.Module):
        """Plain attention in place of the core, which has its mask on a GPU."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.permute(2, 0, 1, 3).flatten(2)

    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        recompute_granularity="selective" if recomputed else None,
        recompute_modules=["layernorm"],
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    layers = [build_module(spec, config=config, layer_number=number) for number in (1, 2)]
    assert all(each.recompute_input_layernorm is recomputed for each in layers)
    assert all(each.recompute_pre_mlp_layernorm is recomputed for each in layers)
    given = drawn(TOKENS, BATCH, HIDDEN, seed=6)
    states = given * 1.5
    for each in layers:
        states, _ = each(states, attention_mask=None)
    states.square().mean().backward()
    return [states, given.grad, *(each.grad for layer in layers for each in layer.parameters())]


CASES: dict[str, Callable[..., list[Tensor]]] = {
    **{
        name: lambda *, recomputed, function=each: after_a_function(function, recomputed=recomputed)
        for name, each in FUNCTIONS.items()
    },
    "layers": after_a_layer,
}


def in_a_fork(case: Callable[..., list[Tensor]]) -> str:
    """Return whether a case is right, or how its process ended."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            plain, recomputed = case(recomputed=False), case(recomputed=True)
            right = len(plain) == len(recomputed) and all(map(torch.equal, plain, recomputed))
        except BaseException:  # noqa: BLE001 - any end of the case is a result
            os._exit(3)
        os._exit(0 if right else 2)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "equal", 2: "other values", 3: "an error"}.get(ended, f"signal {-ended}")


def as_on_a_cpu(module: Any) -> None:
    """Let a host without a GPU or Transformer Engine run it: no state of CUDA's random numbers, and no FP8."""
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.current_device = lambda: "cpu"
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        module.activation_recompute_forward = lambda **_: nullcontext()
        module.fp8_autocast = lambda **_: nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    if os.environ.get(STORAGE) == "copied" or not is_compiled(module):
        module._share_storage_ext = SimpleNamespace(share_storage=copied)


def is_compiled(module: Any) -> bool:
    """Let upstream compile its extension, and return whether it could; releases up to 0.16.1 have none."""
    try:
        module._get_share_storage()
    except Exception:  # noqa: BLE001 - torch passes on the errors of its compilers
        return False
    return True


def copied(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, as releases up to 0.16.1 do where later ones compile an extension: for hosts without a compiler."""
    with torch.no_grad():
        to.untyped_storage().resize_(source.untyped_storage().size())
        to.untyped_storage().copy_(source.untyped_storage())


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(RANDOM)
    as_on_a_cpu(module)
    cases = {name: CASES[name] for name in names or CASES}
    records = {each.overlay.id: each for each in megacpp_overlays.audit().records}
    found = {"decision": records[OVERLAY].decision.value, "on": {name: in_a_fork(each) for name, each in cases.items()}}
    megacpp_overlays.undo()
    found["off"] = {name: in_a_fork(each) for name, each in cases.items()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
