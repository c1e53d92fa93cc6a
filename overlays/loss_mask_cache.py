"""Repair of the loss mask that Megatron's GPT dataset caches: padding of a sample is masked in the cache.

The cached mask should be all ones, but the sample that fills the cache masks its own padding in it. So the seam sets the cache to ones
after that sample. In releases where each later sample masks its padding in the cache too, such a sample gets a copy. A cache that
other code has filled is not set to ones.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6981
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import loss_mask_cache as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _fill_apart(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    """Return a `__getitem__` that sets the cached mask to ones after the sample that fills the cache."""
    import torch

    def __getitem__(self: Any, idx: Any) -> Any:  # noqa: N807
        cached = self.masks_and_position_ids_are_cached
        try:
            return original(self, idx)
        finally:
            if not cached and self.masks_and_position_ids_are_cached:
                self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)

    return __getitem__


def _read_apart(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """Return the `__getitem__` of `_fill_apart` that also gives each later sample a copy of the cached mask."""
    fill = _fill_apart(original, module)

    def __getitem__(self: Any, idx: Any) -> Any:  # noqa: N807
        if not self.masks_and_position_ids_are_cached:
            return fill(self, idx)
        kept = self.cached_loss_mask
        self.cached_loss_mask = kept.clone()
        try:
            return original(self, idx)
        finally:
            self.cached_loss_mask = kept

    return __getitem__


_PAD = 1


def observe(module: ModuleType) -> Observation:
    """Read two padded samples and one without padding from one dataset, and count the tokens that have a loss.

    The dataset is broken unless it counts 3, 3 and 4.
    """
    import numpy as np

    samples = ([3, 4, 5, 6, _PAD], [3, _PAD, 5, 6, 7], [3, 4, 5, 6, 7])
    counts_documents = hasattr(module.GPTDatasetConfig, "inter_document_masking")
    data = object.__new__(getattr(module, feature.CLASS))
    vars(data).update(
        config=SimpleNamespace(
            add_extra_token_to_sequence=True,
            tokenizer=SimpleNamespace(eod=2),
            **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
            **dict.fromkeys(("create_attention_mask", "inter_document_masking"), False),
        ),
        masks_and_position_ids_are_cacheable=True,
        masks_and_position_ids_are_cached=False,
        cached_loss_mask=None,
        _pad_token_id=_PAD,
        _query_document_sample_shuffle_indices=lambda each: (
            np.array(samples[each]),
            None,
            *([[len(samples[each])]] if counts_documents else []),
        ),
    )
    counted = [int(data[each]["loss_mask"].sum()) for each in range(len(samples))]
    seen = f"tokens with a loss in samples of 3, 3 and 4 that have one: {counted}"
    return Observation(broken=counted != [3, 3, 4], seen=seen)


def _seams(make: Callable[..., Any]) -> tuple[Replacement, ...]:
    return (Replacement(symbol=feature.METHOD, make=make),)


OVERLAY = Overlay(
    id="loss-mask-cache",
    pack=49,
    title="keep the padding of samples out of the loss mask that GPT datasets cache",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.FIRST: _seams(_fill_apart), feature.EVERY: _seams(_read_apart)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "tokens have no loss after a padded sample",
        "loss is lower or noisier with padded samples in a GPTDataset",
        "data loader workers count different numbers of tokens",
    ),
    concerns="every model",
    breaks="where the first sample that a process of a data loader serves has padding, all later ones have no loss at its places; up to "
    "0.14.0 every padded sample takes its places from all later ones",
    brief="padding in cached loss masks",
    until="a copy is cached",
    retire_when="GPTDataset caches a copy of the loss mask",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=6981, state="open, opened 2026-08-30"),
        Thread(
            repository="NVIDIA/Megatron-LM", number=1711, state="closed, clones where the cache is read, from 0.15.0"
        ),
    ),
    last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0: megatron-core 0.12.0, 0.14.0, 0.16.1 and 0.19.2, main d98e8a64dd and dev "
    "d48bd6be0a; 0.7.0 to 0.19.2 read",
)
