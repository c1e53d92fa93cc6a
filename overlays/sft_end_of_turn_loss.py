"""Labels of ends of turns in fine-tuning on conversations with a tokenizer that pads with its end-of-text token.

Upstream pads a sample with the tokenizer's padding token, and then masks each label that is this token. A tokenizer without a padding token pads with its end-of-text token, so models do not
learn to end a turn. The base class of the dataset detects the collision and keeps a sentinel that is no token, which the method does not read.

Upstream's method runs with the sentinel for the padding token, and padding becomes the tokenizer's token afterwards. Where a configuration has `allow_ambiguous_pad_tokens`, and where padding has its own token, nothing differs from upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import sft_end_of_turn_loss as feature
from megacpp_overlays.model import Observation, Overlay, Replacement
from megacpp_overlays.runtime.bare_instances import bare
from megacpp_overlays.runtime.in_this_thread import Instead

_PADDED = ("tokens", "labels")


def _make(original: Callable[..., dict[str, Any]], _module: ModuleType) -> Callable[..., dict[str, Any]]:
    def __getitem__(self: Any, idx: int) -> dict[str, Any]:  # noqa: N807 - the target
        tokenizer = self.config.tokenizer
        pad, kept = tokenizer.pad, getattr(self, feature.KEPT, None)
        if kept is None or kept == pad:
            return original(self, idx)
        told_apart = Instead(self, config=Instead(self.config, tokenizer=Instead(tokenizer, pad=kept)))
        sample = original(told_apart, idx)
        for name in _PADDED:
            sample[name][sample[name] == kept] = pad
        return sample

    return __getitem__


_END, _LENGTH = 2, 6
_TURN = (5, _END, 7, _END)


def observe(module: ModuleType) -> Observation:
    """Serve two turns and padding, with padding that ends turns, and with padding of its own."""
    import numpy as np

    seen, broken = [], False
    right = [float(each < len(_TURN) - 1) for each in range(_LENGTH)]
    for pad, kept in ((_END, -1), (1, 1)):
        tokenizer = SimpleNamespace(
            pad=pad, eod=_END, tokenize_conversation=lambda *_, **__: (np.array(_TURN), np.array(_TURN))
        )
        config = SimpleNamespace(
            tokenizer=tokenizer,
            sequence_length=_LENGTH,
            context_parallel_size=1,
            reset_position_ids=False,
            create_attention_mask=False,
            reset_attention_mask=False,
        )
        attributes = {
            feature.KEPT: kept,
            "config": config,
            "dataset": [[{"role": "system"}]],
            "indices": np.zeros(1, dtype=np.int64),
            "_calculate_padding_divisor": lambda: 1,  # of dev
        }
        found = bare(module.SFTDataset, **attributes)[0]
        losses = found["loss_mask"].tolist()
        padding = {int(each) for name in _PADDED for each in found[name][len(_TURN) :]}
        broken |= losses != right or padding != {pad}
        seen.append(f"losses {losses} with padding {pad}, which is {padding} in the sample")
    return Observation(broken=broken, seen=f"turns that end with {_END}: {'; '.join(seen)}; right are {right}")


OVERLAY = Overlay(
    id="sft-end-of-turn-loss",
    pack=67,
    title="let fine-tuning on conversations learn ends of turns where padding is the end-of-text token",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={feature.MASKED: (Replacement(symbol=feature.TARGET.symbol, make=_make),)},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "a model that was fine-tuned with Megatron's `--sft` never ends its answer",
        "no loss on the end-of-turn token with `--sft`",
    ),
    concerns="conversations",
    breaks="with --sft and a tokenizer that pads with its end-of-text token ends of turns have no loss, so models do not learn to end an answer",
    retire_when="SFTDataset masks padding by its place, or by a number that is no token",
    brief="the loss of ends of turns in SFT",
    until="padding is masked by its place",
    threads=(),
    last_validated="2026-11-29, x86-64 without GPU, torch 2.11.0: megatron-core 0.18.2 and 0.19.2, main d98e8a64dd and dev d48bd6be0a; 0.17.0 to 0.19.2 read",
)
