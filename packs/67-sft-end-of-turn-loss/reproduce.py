"""Megatron's dataset for fine-tuning on conversations, and a tokenizer that pads with its end-of-text token: is the end of a turn learned?

A real `SFTDataset` serves conversations that are packed into one sample. A token has a loss where it is one of a conversation and no prompt. Once tokens are numbers of a tokenizer written
here, and once those of Megatron's `SFTTokenizer` with a tokenizer of transformers that has no padding token.
"""

from __future__ import annotations

import functools
import importlib
import logging
import tempfile
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

OVERLAY = "sft-end-of-turn-loss"
MODULE = "megatron.training.datasets.sft_dataset"
END, PAD, IGNORED, LENGTH = 2, 1, -100, 24
WORDS = ("<unk>", "<pad>", "</s>", "system", "user", "assistant", "hello", "there", "good", "day")
CONVERSATION: Sequence[Mapping[str, str]] = (
    {"role": "system", "content": "good"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "good day"},
)
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


class Tokenizer:
    """Numbers for words, of which each turn has those of its role, its content and an end; the answer alone is learned."""

    eod, vocab_size, unique_identifiers = END, len(WORDS), {"tokenizer": "words"}

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def tokenize_conversation(self, conversation: Any, **_: Any) -> Any:
        """Return tokens, and targets with prompts left out."""
        import numpy as np

        turns = [[WORDS.index(word) for word in (turn["role"], *turn["content"].split(), "</s>")] for turn in conversation]
        targets = [turn if each["role"] == "assistant" else [IGNORED] * len(turn) for turn, each in zip(turns, conversation, strict=True)]
        return np.concatenate(turns), np.concatenate(targets)


def _of_words() -> Behaviour:
    return _learned(Tokenizer(END))


def _of_transformers() -> Behaviour:
    try:
        library = importlib.import_module("transformers")
        made = importlib.import_module("tokenizers")
        megatron = importlib.import_module("megatron.core.tokenizers.text.libraries.sft_tokenizer")
    except ImportError as error:
        raise Blocked(f"Megatron's tokenizer of conversations cannot be imported: {error}") from error
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = made.Tokenizer(made.models.WordLevel(vocabulary, unk_token=WORDS[0]))
    words.pre_tokenizer = made.pre_tokenizers.WhitespaceSplit()
    plain = library.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=WORDS[0], eos_token=WORDS[END])
    plain.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        theirs = megatron.SFTTokenizer(folder, "default")
    wrapped = SimpleNamespace(pad=theirs.pad_id, eod=theirs.eod, tokenize_conversation=theirs.tokenize_conversation)
    return _learned(SimpleNamespace(**vars(wrapped), vocab_size=len(WORDS), unique_identifiers={"tokenizer": "of transformers"}))


def _learned(tokenizer: Any) -> Behaviour:
    sample = served(tokenizer)
    counted = counts(tokenizer, sample)
    return Behaviour(
        broken=counted["ends with a loss"] != counted["ends"] or counted["words with a loss"] != counted["words"] or bool(counted["padding with a loss"]),
        seen=", ".join(f"{name}: {number}" for name, number in counted.items()),
    )


def counts(tokenizer: Any, sample: Mapping[str, Any]) -> dict[str, int]:
    """Return how many labels are ends of turns and other words that are learned, padding, and how many of each have a loss."""
    import torch

    _, targets = tokenizer.tokenize_conversation([*CONVERSATION], return_target=True, add_generation_prompt=False)
    real = torch.tensor([*targets, *targets][1:])
    learned = torch.zeros(LENGTH, dtype=torch.bool)
    learned[: len(real)] = real != IGNORED
    ends = torch.zeros(LENGTH, dtype=torch.bool)
    ends[: len(real)] = real == END
    has_loss = sample["loss_mask"].bool()
    padding = torch.arange(LENGTH) >= len(real)
    groups = {"ends": ends, "words": learned & ~ends, "padding": padding}
    return {f"{name}{said}": int((group & mask).sum()) for name, group in groups.items() for said, mask in (("", group), (" with a loss", has_loss))}


def served(tokenizer: Any, conversations: int = 2, *, length: int = LENGTH, **asked: Any) -> dict[str, Any]:
    """Return the sample of a dataset of one line, in which so many conversations are packed.

    Args:
        tokenizer: of the dataset.
        conversations: in the line.
        length: of a sample.
        asked: fields of the dataset's configuration.

    Raises:
        TargetAbsent: this release has no such dataset, or its configuration no such field.
    """
    import numpy as np

    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {MODULE}: {error}") from error
    config = importlib.import_module("megatron.core.datasets.gpt_dataset").GPTDatasetConfig
    if unknown := [name for name in asked if not hasattr(config, name)]:
        raise TargetAbsent(f"GPTDatasetConfig has no {unknown[0]}")
    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)
    given = {"random_seed": 1, "sequence_length": length, "tokenizer": tokenizer, "split": "1,0,0", "blend": (["x"], None), "context_parallel_size": 1, **masks, **asked}
    logging.getLogger("megatron.core.datasets").setLevel(logging.WARNING)  # megatron.training has it on standard output
    split = importlib.import_module("megatron.core.datasets.utils").Split.train
    lines = [[*CONVERSATION] * conversations]
    return dict(module.SFTDataset(lines, "x", np.arange(1), 1, split, config(**given))[0])


_case = functools.partial(Case, overlay=OVERLAY, device="cpu")
CASES = (
    _case(name="end-as-padding-cpu", versions=("torch",), run=_of_words),
    _case(name="tokenizer-of-transformers-cpu", versions=("torch", "transformers"), run=_of_transformers),
)
