"""Liger's kernels on a GLM-4V model that exists already: are its gradients those of transformers?

A small model of transformers runs forwards and backwards as it is, and with kernels as the Trainer's `use_liger_kernel=True` applies them. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

OVERLAY = "liger-glm4v-norms"
FUNCTION = "apply_liger_kernel_to_glm4v"
KERNELS = {"fused_linear_cross_entropy": False}
"""Arguments of Liger: the loss has packs of its own."""
TOLERANCE = 1e-3
"""Of a gradient in float32, relative, in Frobenius norms."""


def _run() -> Behaviour:
    stock, said, worst = gradients(model()), [], 0.0
    for name, apply in (("as the Trainer does", applied_to_instance), ("by the function of the model", applied)):
        found = gradients(apply(model(), **KERNELS))
        off = {key: apart(found[key], right) for key, right in stock.items()}
        name_of_worst = max(off, key=lambda key: off[key])
        worst = max(worst, off[name_of_worst])
        said.append(f"{name}: loss {off['loss']:.1e}, {name_of_worst} {off[name_of_worst]:.1e}")
    return Behaviour(broken=worst > TOLERANCE, seen=f"loss and the worst of {len(stock) - 1} gradients are off by: {'; '.join(said)}")


def apart(found: Any, right: Any) -> float:
    """Return how far a tensor is off, relative to the right one."""
    return float((found - right).norm() / right.norm().clamp(min=1e-12))


def gradients(model: Any) -> dict[str, Any]:
    """Return the loss of a model, and the gradients of its parameters by name."""
    import torch

    tokens = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(63))
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    learnt = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **learnt}


def model(dtype: str = "float32") -> Any:
    """Return a small GLM-4V model, the same each time.

    Raises:
        Blocked: transformers is not installed.
        TargetAbsent: transformers or Liger does not know the model.
    """
    import torch

    functions()
    transformers = importlib.import_module("transformers")
    if not hasattr(transformers, "Glm4vConfig"):
        raise TargetAbsent("this transformers has no GLM-4V")
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    asked = {"text_config": {**text, **heads, "rope_parameters": rope}, "vision_config": vision}
    configuration = transformers.Glm4vConfig(**asked, attn_implementation="eager")
    with torch.random.fork_rng([]):
        torch.manual_seed(63)
        return transformers.Glm4vForConditionalGeneration(configuration).to(getattr(torch, dtype))


def applied_to_instance(model: Any, **kernels: Any) -> Any:
    """Apply kernels as the Trainer does, and return the model."""
    return _applied("_apply_liger_kernel_to_instance", model, kernels)


def applied(model: Any, **kernels: Any) -> Any:
    """Apply kernels with the function of the model, and return the model."""
    return _applied(FUNCTION, model, kernels)


def _applied(name: str, model: Any, kernels: dict[str, Any]) -> Any:
    with classes_kept():
        getattr(functions(), name)(model=model, **kernels)
    return model


@contextlib.contextmanager
def classes_kept(module: str = "transformers.models.glm4v.modeling_glm4v") -> Iterator[None]:
    """Put the classes of a module of transformers back at the end, which Liger replaces for models that are built later."""
    names = vars(importlib.import_module(module))
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)


@functools.cache
def functions() -> Any:
    """Return Liger's functions that apply kernels.

    Raises:
        Blocked: transformers is not installed.
        TargetAbsent: Liger does not know the model.
    """
    try:
        from liger_kernel.ops import rms_norm
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise Blocked(f"this liger-kernel cannot be imported here: {error}") from error
    if not hasattr(monkey_patch, FUNCTION):
        raise TargetAbsent(f"there is no {FUNCTION}")
    _run_in_interpreter(rms_norm)
    return monkey_patch


def _run_in_interpreter(kernels: Any) -> None:
    """Let Triton's interpreter run kernels of norms: it has no libdevice, and hands numbers over that have no dtype."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    names = vars(interpreter)
    convert = names["_implicit_cvt"]

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)

    names["_implicit_cvt"] = converted
    kernels.rsqrt = lambda value: tl.rsqrt(value)  # the interpreter replaces it while a kernel runs


CASES = (
    Case(
        name="small-model-cpu",
        overlay=OVERLAY,
        device="cpu",
        versions=("liger-kernel", "transformers", "torch", "triton", "numpy"),
        run=_run,
        environment={"TRITON_INTERPRET": "1"},
    ),
)
