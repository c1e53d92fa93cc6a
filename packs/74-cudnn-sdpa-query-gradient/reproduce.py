"""Attention of transformers where cuDNN's backward pass fails: are gradients finite, and those of float32?

A layer of Llama gets logits near -120, as layers with large activations have them, over 192 keys: one tile of 128 and half of another. Compared are gradients of its weights with those of the same layer in float32.
Of one query over 128 keys the function that layers call is asked itself. Where the cuDNN that is loaded is right on this GPU there is nothing to show, and cases are blocked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

OVERLAY = "cudnn-sdpa-query-gradient"
KEYS, HEADS, SIZE, LOGIT = 192, 4, 64, -120.0
TOLERANCE = 3e-2
"""Of gradients in bfloat16, relative, in Frobenius norms."""


def _run(mask: str, *, compiled: bool = False) -> Behaviour:
    import torch

    _ask_cudnn(queries=KEYS, keys=KEYS, has_mask=mask != "none")
    made = layer().cuda()
    found = gradients(made.bfloat16(), hidden().cuda().bfloat16(), mask, compiled=compiled)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = gradients(made.float(), hidden().cuda().bfloat16().float(), mask)
    return _judged(f"mask {mask}, {KEYS} keys", {name: apart(found[name], each) for name, each in right.items()})


def _judged(call: str, off: Mapping[str, float]) -> Behaviour:
    said = ", ".join(f"{name} {each:.1e}" for name, each in off.items())
    broken = not all(each < TOLERANCE for each in off.values())  # and not where one is no number
    return Behaviour(broken=broken, seen=f"{call}: off by {said}")


def apart(found: Any, right: Any) -> float:
    """Return how far a tensor is off, relative, in Frobenius norms."""
    return float((found.float() - right).norm() / right.norm())


def _run_one_query() -> Behaviour:
    _ask_cudnn(queries=1, keys=128, has_mask=False)
    given = tensors(1, 128)
    found, right = attended(*given), attended(*(each.float() for each in given), backend="MATH")
    off = {name: apart(found[name][..., 1:], each[..., 1:]) for name, each in right.items()}
    return _judged("one query, 128 keys", off)


def _ask_cudnn(*, queries: int, keys: int, has_mask: bool) -> None:
    """Check that the cuDNN that is loaded fails here, where it alone may be chosen.

    Raises:
        Blocked: it is right, or takes no such call.
    """
    import torch

    cudnn = f"cuDNN {torch.backends.cudnn.version()} on {torch.cuda.get_device_name()}"
    query, key, value = (each.detach().requires_grad_() for each in tensors(queries, keys))
    mask = torch.ones((queries, keys), dtype=torch.bool, device="cuda") if has_mask else None
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    except RuntimeError as error:
        raise Blocked(f"{cudnn} takes no such call: {str(error).splitlines()[0]}") from error
    if all(bool(torch.isfinite(each).all()) for each in found):
        raise Blocked(f"{cudnn} is right")


def layer() -> Any:
    """Return a layer of Llama in float32, the same each time, in which every logit is near -120."""
    import torch

    library()
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    width = HEADS * SIZE
    config = llama.LlamaConfig(
        hidden_size=width, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE,
        attention_bias=True, attn_implementation="sdpa",
    )
    made = llama.LlamaAttention(config, layer_idx=0)
    numbers = torch.Generator().manual_seed(74)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=numbers) / width if each.ndim > 1 else torch.zeros(each.shape))
        made.q_proj.bias.view(HEADS, SIZE)[:, 0] = 1.0
        made.k_proj.bias.view(HEADS, SIZE)[:, 0] = LOGIT * SIZE**0.5
    return made


def hidden(rows: int = KEYS) -> Any:
    """Return the input of a layer in float32, the same each time."""
    import torch

    return torch.randn((2, rows, HEADS * SIZE), generator=torch.Generator().manual_seed(7))


def gradients(made: Any, rows: Any, mask: str, *, compiled: bool = False) -> dict[str, Any]:
    """Return gradients of weights of a layer, after one pass in each direction, without those of the first number of each head.

    Args:
        made: the layer.
        rows: its input.
        mask: `bool` and `float` hide the future, and the first keys of one row; `none` hides nothing.
        compiled: whether the layer is compiled, as one graph.
    """
    import torch

    made.zero_grad()
    count = rows.shape[1]
    turned = rows.new_ones((1, count, SIZE)), rows.new_zeros((1, count, SIZE))  # rotated by nothing
    given = None
    made.is_causal = mask != "none"
    if mask != "none":
        given = torch.ones((2, 1, count, count), dtype=torch.bool, device=rows.device).tril()
        given[1, :, :, : count // 4] = torch.eye(count, dtype=torch.bool, device=rows.device)[:, : count // 4]
        if mask == "float":
            given = rows.new_zeros(given.shape).masked_fill(~given, torch.finfo(rows.dtype).min)
    run = torch.compile(made, fullgraph=True) if compiled else made
    output = run(rows, position_embeddings=turned, attention_mask=given)[0]
    output.backward(hidden(count).to(output))
    named = {"queries": made.q_proj, "keys": made.k_proj, "values": made.v_proj}
    # The first number of each head is the same for all keys: its gradient is a sum that cancels, of which bfloat16 keeps nothing.
    return {name: each.weight.grad.view(HEADS, SIZE, -1)[:, 1:].clone() for name, each in named.items()}


def tensors(queries: int, keys: int, *, logit: float = LOGIT, device: str = "cuda") -> tuple[Any, Any, Any]:
    """Return a query, keys and values of two heads in bfloat16, the same each time, whose logits are near a number."""
    import torch

    numbers = torch.Generator().manual_seed(74)
    query, key, value = (torch.randn((1, 2, count, SIZE), generator=numbers) / scale for count, scale in ((queries, 10), (keys, 10), (keys, 1)))
    query[..., 0], key[..., 0] = 1.0, logit * SIZE**0.5
    return query.to(device).bfloat16(), key.to(device).bfloat16(), value.to(device).bfloat16()


def attended(query: Any, key: Any, value: Any, *, backend: str = "", mask: Any = None) -> dict[str, Any]:
    """Return the output of attention of transformers, and gradients of what it is given.

    Args:
        query: with a head for each of the keys.
        key: of these.
        value: of these.
        backend: the only one that may be chosen; torch's choice where it is empty.
        mask: of logits.
    """
    import torch

    given = [each.detach().requires_grad_() for each in (query, key, value)]
    chosen = torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)) if backend else contextlib.nullcontext()
    with chosen:
        output = attention()(torch.nn.Module(), *given, mask)[0]
    found = torch.autograd.grad(output, given, torch.ones_like(output))
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), found, strict=True))}


def attention() -> Callable[..., Any]:
    """Return the function that layers of transformers call."""
    library()
    found: Callable[..., Any] = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS["sdpa"]
    return found


def library() -> None:
    """Import transformers.

    Raises:
        TargetAbsent: it is not installed.
    """
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"transformers cannot be imported: {error}") from error


QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
_case = functools.partial(
    Case, overlay=OVERLAY, device="cuda", versions=("transformers", "torch", "nvidia-cudnn-cu13"), environment=QUIET
)
CASES = (
    _case(name="mask-gpu", run=functools.partial(_run, "bool")),
    _case(name="float-mask-gpu", run=functools.partial(_run, "float")),
    _case(name="no-mask-gpu", run=functools.partial(_run, "none")),
    _case(name="compiled-gpu", run=functools.partial(_run, "bool", compiled=True)),
    _case(name="one-query-gpu", run=_run_one_query),
)
