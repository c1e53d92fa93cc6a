"""Probe modules of Megatron that were given tensor parallel groups for calls that do not pass them on.

A helper that is given no group takes the default one of the process. Where a model was built with other groups, ranks that have
nothing to do with each other then exchange values. Nothing raises where both groups have as many ranks.

No tree has a repair. A seam names the group for as long as upstream's method runs. So each verdict rests on that method, on the
helpers that it calls without a group, and on the functions that give them the default one.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.findings import absent, finding_of
from megacpp_overlays.source.trees import SourceTree

HELPER = "get_tensor_model_parallel_group_if_none"
DEFAULT_GROUP = "default-group-for-the-caller"
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


def _probe_of(target: Target, word: str = "", said: str = "") -> Callable[[SourceTree], Finding]:
    """Return the probe of a module that hands work on, ABSENT where there is no helper, no definition, or not the word that it needs."""

    def ask(tree: SourceTree) -> Finding:
        needed = {f"{DEFAULT.module}:{HELPER}": "nothing takes groups"} | (
            {f"{target.module}#{word}": said} if word else {}
        )
        needed[f"{target.module}:{target.symbol}"] = f"there is no {target.symbol}"
        return forms.finding("explicit-tp-groups", target, tree, needed)

    return ask


_helper = _probe_of(DEFAULT)
probe_cross, probe_latent = _probe_of(CROSS), _probe_of(LATENT)
probe_llava = _probe_of(LLAVA, "tp_group", "LLaVAModel takes no groups")
probe_prediction = _probe_of(PREDICTION, "self.tp_group", "a prediction layer has no group of its own")
probe_layers, probe_checkpoint = _probe_of(LAYERS), _probe_of(CHECKPOINT)
probe_old_layers = _probe_of(OLD_LAYERS, "def _checkpointed_forward(", f"there is no {OLD_LAYERS.symbol}")
_CALLERS = (probe_cross, probe_latent, probe_llava, probe_prediction, probe_layers, probe_old_layers, probe_checkpoint)


def probe(tree: SourceTree) -> Finding:
    """Return whether the helper is asked for a group by something that has one and cannot tell it."""
    found = _helper(tree)
    if found.verdict is Verdict.BROKEN and all(
        finding_of(each, tree).verdict in {Verdict.ABSENT, Verdict.FIXED} for each in _CALLERS
    ):
        return absent("nothing hands work on without its group")
    return found
