"""A GPT dataset of real files: do samples have the loss of all their tokens, whatever sample was served first?"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.datasets.gpt_dataset"
LENGTH, PAD, EOD = 8, 1, 2
CLEAN = [*range(10, 10 + LENGTH)]
DOCUMENTS = ([10, 11, 12, 13, EOD, PAD, PAD, PAD], [10, EOD, PAD, PAD, 20, 21, 22, EOD], CLEAN, CLEAN[::-1])
PADDED_TAIL, PADDED_MIDDLE, FIRST_CLEAN, LAST_CLEAN = range(len(DOCUMENTS))
COUNTED = [sum(token != PAD for token in document[1:]) for document in DOCUMENTS]
"""Labels, which are the tokens that follow, are no padding so often; none follows the last token."""


class Tokenizer:
    """Numbers that a dataset asks its tokenizer for."""

    vocab_size, eod, eos, pad = 100, EOD, EOD, PAD
    unique_identifiers = ()


def _builder(path: str) -> Any:
    import numpy as np

    return importlib.import_module("megatron.core.datasets.indexed_dataset").IndexedDatasetBuilder(path, dtype=np.int32)


def dataset(folder: Path, **other: Any) -> Any:
    """Return a dataset of files in a folder, whose samples are documents, in order."""
    import numpy as np
    import torch

    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {MODULE}") from error

    class InOrder(module.GPTDataset):  # type: ignore[misc] # of a module that is found at run time
        """A dataset that is not shuffled, for which no compiled helper is asked."""

        def _build_document_sample_shuffle_indices(self) -> Any:
            number = np.arange(len(DOCUMENTS) + 1)
            return number % len(DOCUMENTS), np.stack([number, number * 0], axis=1), number[:-1]

    prefix = str(folder / "documents")
    builder = _builder(f"{prefix}.bin")
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    asked = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)
    if unknown := [name for name in other if name not in asked and not hasattr(module.GPTDatasetConfig, name)]:
        raise TargetAbsent(f"GPTDatasetConfig has no {unknown[0]}")
    config = module.GPTDatasetConfig(
        **{"random_seed": 1, "sequence_length": LENGTH, "tokenizer": Tokenizer(), "split": "1,0,0", **asked, **other},
        add_extra_token_to_sequence=False,
    )
    low = module.GPTDataset.build_low_level_dataset(prefix, config)
    split = importlib.import_module("megatron.core.datasets.utils").Split.train
    return InOrder(low, prefix, np.arange(len(DOCUMENTS), dtype=np.int32), None, split, config)


def served(order: Sequence[int | None], **other: Any) -> list[dict[str, Any]]:
    """Return samples of one dataset in the order in which they are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        data = dataset(Path(folder), **other)
        return [dict(data[each]) for each in order]


def _counted(*first: int) -> Behaviour:
    order = [*first, FIRST_CLEAN, LAST_CLEAN]
    found = [int(each["loss_mask"].sum()) for each in served(order)]
    right = [COUNTED[each] for each in order]
    seen = f"samples {order}: tokens with a loss {found}, of {right} that have one"
    return Behaviour(broken=found != right, seen=seen)


_case = functools.partial(Case, overlay="loss-mask-cache", device="cpu", versions=("torch",))
CASES = (
    _case(name="padding-first-cpu", run=functools.partial(_counted, PADDED_TAIL)),
    _case(name="padding-twice-cpu", run=functools.partial(_counted, PADDED_MIDDLE, PADDED_TAIL)),
)
