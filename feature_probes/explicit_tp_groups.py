"""Probe modules of Megatron that were given tensor parallel groups for calls that do not pass them on.

A helper that is given no group takes the default one of the process. Where a model was built with other groups, ranks that have
nothing to do with each other then exchange values. Nothing raises where both groups have as many ranks.

No tree has a repair. A seam names the group for as long as upstream's method runs. So each verdict rests on that method, on the
helpers that it calls without a group, and on what answers them with the default one.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.findings import absent, finding_of
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

FORWARD = "MultiLatentAttention.forward"
HELPER = "get_tensor_model_parallel_group_if_none"
UNTOLD = "default-group-for-whoever-asks"
PROJECTIONS = "projections-of-the-default-group"
LATENTS = "latents-over-the-default-group"
ATTENTION = "attention-of-the-default-group"
EMBEDDINGS = "embeddings-over-the-default-group"
SAVED = "saved-over-the-default-group"
STACK = "layers-saved-over-the-default-group"
PIECES = "pieces-of-the-default-group"


def _target(module: str, symbol: str) -> Target:
    return Target(distribution="megatron-core", module=f"megatron.core.{module}", symbol=symbol)


DEFAULT = _target("utils", HELPER)
CROSS = _target("transformer.attention", "CrossAttention.__init__")
LATENT = _target("transformer.multi_latent_attention", "MLASelfAttention.get_query_key_value_tensors")
LLAVA = _target("models.multimodal.llava_model", "LLaVAModel._process_embedding_token_parallel")
PREDICTION = _target("transformer.multi_token_prediction", "MultiTokenPredictionLayer._checkpointed_forward")
LAYERS = _target("recompute", "checkpointed_forward")
OLD_LAYERS = _target("transformer.transformer_block", "TransformerBlock._checkpointed_forward")
CHECKPOINT = _target("tensor_parallel.random", "CheckpointFunction")


def probe(tree: SourceTree) -> Finding:
    """Return whether the helper is asked for a group by something that has one and cannot tell it."""
    found = _found(tree, DEFAULT)
    if found.verdict is Verdict.BROKEN and all(
        finding_of(each, tree).verdict in {Verdict.ABSENT, Verdict.FIXED} for each in _CALLERS
    ):
        return absent("nothing hands work on without its group")
    return found


def probe_cross(tree: SourceTree) -> Finding:
    """Return whether a cross attention builds projections without its group."""
    return _found(tree, CROSS)


def probe_latent(tree: SourceTree) -> Finding:
    """Return whether a multi-latent attention gathers latents without its group."""
    return _found(tree, LATENT)


def probe_llava(tree: SourceTree) -> Finding:
    """Return whether LLaVA shares embeddings out without its group."""
    return _found(tree, LLAVA, "tp_group", "LLaVAModel takes no groups")


def probe_prediction(tree: SourceTree) -> Finding:
    """Return whether a prediction layer shares out what it saves without its group."""
    return _found(tree, PREDICTION, "self.tp_group", "a prediction layer has no group of its own")


def probe_layers(tree: SourceTree) -> Finding:
    """Return whether a block shares out what it saves without its group, since 0.18.0."""
    return _found(tree, LAYERS)


def probe_old_layers(tree: SourceTree) -> Finding:
    """Return whether a block shares out what it saves without its group, up to 0.17.1."""
    return _found(tree, OLD_LAYERS, "def _checkpointed_forward(", f"there is no {OLD_LAYERS.symbol}")


def probe_checkpoint(tree: SourceTree) -> Finding:
    """Return whether what is saved is cut and gathered without a group."""
    return _found(tree, CHECKPOINT)


_CALLERS = (
    probe_cross,
    probe_latent,
    probe_llava,
    probe_prediction,
    probe_layers,
    probe_old_layers,
    probe_checkpoint,
)
"""Probes of modules that hand work on."""


def _found(tree: SourceTree, target: Target, word: str = "", said: str = "") -> Finding:
    """Return the finding of a part, ABSENT where there is no helper, no definition, or not the word that its module needs."""
    needed = {f"{DEFAULT.module}:{HELPER}": "nothing takes groups"}
    if word:
        needed[f"{target.module}#{word}"] = said
    needed[f"{target.module}:{target.symbol}"] = f"there is no {target.symbol}"
    return forms.finding("explicit-tp-groups", target, tree, needed)
