"""Residual of a recomputed norm that returns its input: exclusion from the outputs that are freed.

`CheckpointWithoutOutput` frees the outputs of a function once the next function has used them, and recomputes them in the backward pass.
The fused residual norm returns its input, in the same storage, in addition to its result. Freeing it takes the residual from the layer and the
input from the recomputation, and the process reads freed memory; restoring it would let a storage own itself.

Upstream's checkpoint runs unchanged. In its list of outputs to free and restore, an empty tensor then replaces each output
that shares its storage with an input, so that the positions of the others stay. No more memory is used: inputs are saved anyway.

Source: https://github.com/NVIDIA/Megatron-LM/pull/4497
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megacpp_overlays.feature_probes import residual_norm_recompute_alias as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import answer

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_RNG = "_get_all_rng_states"


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        before = self.outputs
        returned = original(self, run_function, *args)
        if self.outputs is not before and self.outputs is not None and getattr(self, "output_slot", None) is None:
            inputs = {_storage(each) for each in args if isinstance(each, torch.Tensor)}
            self.outputs = tuple(
                torch.empty(0, dtype=each.dtype, device=each.device)
                if isinstance(each, torch.Tensor) and _storage(each) in inputs
                else each
                for each in self.outputs
            )
        return returned

    return checkpoint


def _storage(tensor: Any) -> int:
    """Return the identity of a tensor's storage. Its data address would be zero for every freed storage."""
    storage: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no public name for it
    return storage


_ASKED = {
    "fp8": False,
    "ckpt_manager": None,
    "output_slot": None,
    "retain_input_tensors": True,
    "ctx": None,
    "outputs": None,
}
"""Attributes of a checkpoint, on every tree, for a norm that returns its input."""


def observe(module: ModuleType) -> Observation:
    """Checkpoint a function that returns its input and the double of it, and discard the outputs, on the CPU."""
    import torch

    cls = getattr(module, feature.CLASS)
    checkpoint = cls.__new__(cls)  # its constructor may import modules that need this one
    vars(checkpoint).update(_ASKED)
    with torch.inference_mode(False), _no_graphs(), _no_rng(module):
        states = torch.ones(2, dtype=torch.float32, device="cpu")
        doubled, residual = checkpoint.checkpoint(lambda given: (given * 2, given), states)
        checkpoint.discard_output_and_register_recompute(torch.zeros((), dtype=torch.float32, device="cpu"))
        left = [each.untyped_storage().nbytes() for each in (doubled, residual)]
    return Observation(
        broken=left != [0, states.nbytes],
        seen=f"bytes of the result and of the input, once discarded: {left[0]} and {left[1]}",
    )


@contextmanager
def _no_graphs() -> Iterator[None]:
    """Replace the module of CUDA graphs, which the method imports, while its import is not complete: it imports the target."""
    theirs = sys.modules.get(_GRAPHS)
    if hasattr(theirs, "is_graph_warmup"):
        yield
        return
    sys.modules[_GRAPHS] = _NoGraphs(_GRAPHS)
    try:
        yield
    finally:
        del sys.modules[_GRAPHS]
        if theirs is not None:
            sys.modules[_GRAPHS] = theirs


class _NoGraphs(ModuleType):
    """Module stub without graphs."""

    @staticmethod
    def is_graph_warmup() -> bool:
        return False


@contextmanager
def _no_rng(module: Any) -> Iterator[None]:
    """Disable saving of RNG state in this thread: reading that of CUDA would initialise CUDA."""
    theirs = getattr(module, _RNG)
    setattr(module, _RNG, answer(lambda: None, theirs))
    try:
        yield
    finally:
        setattr(module, _RNG, theirs)


OVERLAY = Overlay(
    id="residual-norm-recompute-alias",
    pack=38,
    title="keep the residual of a norm that is recomputed and returns its input",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.FREED: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "segmentation fault with fused_residual_rmsnorm and recompute",
        "process dies in the first steps with recomputed layer norms",
    ),
    concerns="fused_residual_norm and recompute",
    breaks="with fused_residual_rmsnorm and recomputed layer norms the residual is freed before it is added: the process reads memory that is "
    "gone, and dies",
    retire_when="CheckpointWithoutOutput keeps outputs that share their storage with an input",
    brief="residuals of recomputed fused norms",
    until="outputs that alias an input are kept",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=4497, state="merged 2026-08-19, in no release"),),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.17.1, 0.18.2 and 0.19.2, and dev d48bd6be0a; 0.12.0 to 0.19.2 "
    "and main d98e8a64dd read",
)
