"""Megatron's dataset of conversations with the overlay: where padding is the token that ends turns, ends have a loss and padding has none.

Cases of pack 67 run on releases, each in a process of its own, and with a tokenizer of transformers in a lane that has it.
Further tests read samples of the dataset in this process.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from placed_seams import assert_self_test, placed, stock
from releases import newest
from reproduced_pack import assert_repaired, measured_on, reproduced_in

from megacpp_overlays.feature_probes.sft_end_of_turn_loss import MASKED, TARGET
from megacpp_overlays.overlays.sft_end_of_turn_loss import OVERLAY
from megacpp_overlays.runtime.bare_instances import bare

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore::UserWarning")]

NEWEST, OF_TRANSFORMERS = newest(), "tokenizer-of-transformers-cpu"
measured = measured_on("67", "0.18.2", NEWEST, daily=[NEWEST])
module = stock(TARGET.module)


def test_a_release_is_broken_without_the_overlay_and_right_with_it(measured: Any) -> None:
    assert_repaired(measured, may_be_blocked={OF_TRANSFORMERS})


@pytest.mark.full
def test_it_is_right_with_a_tokenizer_of_transformers() -> None:
    assert_repaired(reproduced_in("mamba3-pinned", "67"))


def test_the_self_test_sees_the_defect_and_its_absence(module: ModuleType) -> None:
    assert_self_test(OVERLAY, module, MASKED)


END, NONE = 2, -1
"""The token that ends turns and pads, and the dataset's sentinel for padding, which is no token."""


def sample(module: ModuleType, tokens: list[int], *, length: int, ranks: int = 1) -> dict[str, list[Any]]:
    """Return tokens, labels and loss mask of a sample with one conversation, under the overlay.

    Every token of the conversation is learned. The tokenizer pads with the token that ends turns.

    Args:
        module: the module of the dataset.
        tokens: of the conversation.
        length: of the sample.
        ranks: of context parallelism.
    """
    tokenizer = SimpleNamespace(
        pad=END, eod=END, tokenize_conversation=lambda *_, **__: (np.array(tokens), np.array(tokens))
    )
    config = SimpleNamespace(
        tokenizer=tokenizer,
        sequence_length=length,
        context_parallel_size=ranks,
        reset_position_ids=False,
        create_attention_mask=False,
        reset_attention_mask=False,
    )
    lines = [[{"role": "system"}]]
    dataset = bare(module.SFTDataset, config=config, dataset=lines, indices=np.zeros(1, int), _pad_token_id=NONE)
    with placed(OVERLAY, MASKED, module):
        served = dataset[0]
    assert config.tokenizer is tokenizer
    assert tokenizer.pad == END
    return {name: served[name].tolist() for name in ("tokens", "labels", "loss_mask")}


def test_a_truncated_sample_has_no_loss_after_its_last_token(module: ModuleType) -> None:
    found = sample(module, [5, END, 6, 7, 8], length=3)

    assert found == {"tokens": [5, END, 6], "labels": [END, 6, END], "loss_mask": [1.0, 1.0, 0.0]}


def test_padding_for_context_parallel_ranks_has_no_loss(module: ModuleType) -> None:
    found = sample(module, [5, 6, END], length=8, ranks=2)

    assert found["tokens"] == [5, 6, END, *[END] * 5]
    assert found["loss_mask"] == [1.0, 1.0, *[0.0] * 6]


def test_each_of_several_end_tokens_at_the_end_of_a_conversation_has_a_loss(module: ModuleType) -> None:
    assert sample(module, [5, END, END], length=4)["loss_mask"] == [1.0, 1.0, 0.0, 0.0]
