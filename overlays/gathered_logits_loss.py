"""Loss of gathered logits from the part of the vocabulary of each tensor parallel rank.

A language model that gathers its logits, because it was made with `parallel_output=False` or is called with `runtime_gather_output=True`, gives them
to a cross entropy over shares of the vocabulary when there are labels. All classes count once for each rank: the loss is the logarithm of the
number of ranks too large, and gradients are wrong.

The method that computes the loss gets logits as upstream's contract demands: where logits are as wide as the vocabulary and there are several
ranks, each rank's part of them, whose gradient is gathered again in the backward pass. Logits that a model returns stay gathered.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import gathered_logits_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.bare_instances import bare
from megacpp_overlays.runtime.in_this_thread import answer


def _make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.mappings import _ScatterToModelParallelRegion

    def compute_language_model_loss(self: Any, labels: Any, logits: Any, **more: Any) -> Any:
        """Take the loss of labels, [b, s], and logits, [s, b, classes of all ranks or of this one]."""
        if logits.size(-1) == getattr(self, "vocab_size", None):
            group = self.pg_collection.tp if hasattr(self, "pg_collection") else get_tensor_model_parallel_group()
            if group.size() > 1:
                logits = _ScatterToModelParallelRegion.apply(logits, group).clone()  # upstream writes to its logits
        return original(self, labels, logits, **more)

    return compute_language_model_loss


_RANKS, _RANK, _CLASSES = 2, 1, 4


def observe(module: ModuleType) -> Observation:
    """Note which logits the second of two ranks gives to the cross entropy: gathered ones, and those of its share."""
    import torch

    seen: list[Any] = []

    def fused(logits: Any, labels: Any, *_: Any) -> Any:
        seen.append(logits.flatten().tolist())
        return labels.float()

    group = SimpleNamespace(size=lambda: _RANKS, rank=lambda: _RANK)
    groups = SimpleNamespace(tp=group)
    model = bare(
        getattr(module, feature.CLASS),
        config=SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"),
        vocab_size=_CLASSES,
        tp_group=group,
        pg_collection=groups,
        model_comm_pgs=groups,
    )
    whole = torch.arange(_CLASSES, dtype=torch.float32, device="cpu").view(1, 1, -1)
    share = whole[..., _CLASSES // _RANKS :]
    labels = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    theirs = module.fused_vocab_parallel_cross_entropy
    module.fused_vocab_parallel_cross_entropy = answer(fused, theirs)  # type: ignore[attr-defined]
    try:
        for logits in (whole, share):
            model.compute_language_model_loss(labels, logits)
    finally:
        module.fused_vocab_parallel_cross_entropy = theirs  # type: ignore[attr-defined]
    expected = [share.flatten().tolist()] * 2
    return Observation(
        broken=seen != expected, seen=f"of gathered logits a rank of {_RANKS} gives {seen[0]} to the cross entropy"
    )


OVERLAY = Overlay(
    id="gathered-logits-loss",
    pack=39,
    title="take the loss of gathered logits from the share of each tensor parallel rank",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.TAKEN_FOR_A_SHARE: (Replacement(symbol=feature.METHOD, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loss is too large by log of the TP size",
        "loss at the first step is higher with tensor parallelism",
        "loss differs between TP 1 and TP 2 with gathered logits",
    ),
    concerns="tensor_parallel",
    breaks="with tensor parallelism the loss of a model that gathers its logits is the logarithm of the number of ranks too large, and its "
    "gradients are wrong",
    retire_when="compute_language_model_loss, or the models that call it, keep gathered logits from the cross entropy over shares",
    brief="losses of gathered logits under TP",
    until="they are not taken for shares",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: finding 2"),),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.15.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.2 "
    "on two gloo ranks; 0.14.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a read",
)
