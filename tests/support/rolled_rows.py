"""Run in a fresh interpreter: packed rows in multi-token prediction, on one rank and on several; JSON.

    python tests/support/rolled_rows.py FOLDER [WAY...]

The release is the one that is first on the path; MEGACPP_OVERLAY_MTP_ROLL_PADDED_BOUNDARIES=off leaves it as it is. Ranks are
forked, and meet in the folder as `forked_ranks` says. Each holds of every document one chunk from the start and one from the end, as
Transformer Engine gives them out. The expected result is written in this file: a document is rolled by itself, padding and all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, bits, on_ranks

MODULE = "megatron.core.transformer.multi_token_prediction"
ID = "mtp-roll-padded-boundaries"
LAYERS, HIDDEN, VOCABULARY, SCALE = 2, 5, 40, 0.3


@dataclasses.dataclass(frozen=True)
class Packing:
    """Documents of a row. Where they are not padded, `lengths` are the tokens that they take up."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    tail: int = 0
    announced: bool = False
    """Whether a caller gives padded boundaries, although nothing is padded."""

    @property
    def places(self) -> list[slice]:
        ends = list(itertools.accumulate(self.padded or self.lengths))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def tokens(self) -> int:
        return self.places[-1].stop + self.tail

    def params(self) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        bounds, padded = (
            None if each is None else torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=DEVICE)
            for each in (self.lengths, self.padded or (self.lengths if self.announced else None))
        )
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )

    def share(self, ranks: int, rank: int) -> torch.Tensor:
        """Return the tokens of a context parallel rank."""
        found: list[int] = []
        for place in self.places:
            chunk = (place.stop - place.start) // (2 * ranks)
            for number in (rank, 2 * ranks - 1 - rank):
                found += range(place.start + number * chunk, place.start + (number + 1) * chunk)
        return torch.tensor(found, device=DEVICE)

    def rolled(self, row: torch.Tensor) -> torch.Tensor:
        """Return each document shifted by one, with a zero at its end; tokens behind the last document stay as they are."""
        whole = row.clone()
        for place in self.places:
            whole[..., place] = torch.cat([row[..., place][..., 1:], torch.zeros_like(row[..., :1])], dim=-1)
        return whole

    def trained(self) -> torch.Tensor:
        """Return 1 where a label is one of the document's own tokens, else 0, [1, tokens]."""
        mask = torch.zeros(1, self.tokens, device=DEVICE)
        for place, length in zip(self.places, self.lengths, strict=True):
            mask[:, place.start : place.start + length - 1] = 1
        return mask


PACKINGS = {
    "padded": Packing((5, 3, 7), padded=(8, 4, 8)),
    "padded with a tail": Packing((6, 2), padded=(8, 4), tail=3),
    "first alone padded": Packing((3, 8), padded=(4, 8)),
    "short": Packing((2, 1, 2), padded=(4, 4, 4)),
    "not padded": Packing((8, 4, 8)),
    "not padded, and announced": Packing((8, 4, 8), announced=True),
    "one document": Packing((12,)),
}
SHARED = ("padded", "first alone padded", "not padded", "one document", "short")
"""Of these every document takes up a multiple of four tokens, and nothing lies behind them."""


def numbered(packing: Packing) -> torch.Tensor:
    """Return a row of which no two labels are the same, [1, tokens]."""
    return torch.arange(1, packing.tokens + 1, device=DEVICE)[None]


def roll(module: ModuleType, packing: Packing) -> dict[str, Any]:
    """Roll labels, a mask and activations of a whole row."""
    params, row, mask = packing.params(), numbered(packing), packing.trained()
    before = dict(vars(params))
    labels, total = module.roll_tensor(row, packed_seq_params=params)
    rolled, count = module.roll_tensor(mask, packed_seq_params=params)
    numbers = torch.Generator().manual_seed(4)
    leaf, weights = (torch.randn(3, 2, packing.tokens, generator=numbers).to(DEVICE) for _ in range(2))
    slopes = []
    for way in (lambda each: module.roll_tensor(each, packed_seq_params=params)[0], packing.rolled):
        own = leaf.clone().requires_grad_()
        (way(own) * weights).sum().backward()
        slopes.append(own.grad)
    own_next = packing.rolled(mask) > 0  # the labels that a second prediction is trained on
    return {
        "wrong labels": int(((labels != packing.rolled(row)) & own_next).sum()),
        "wrong masks": int((rolled != packing.rolled(mask)).sum()),
        "as each document alone": torch.equal(labels, packing.rolled(row))
        and torch.equal(rolled, packing.rolled(mask)),
        "sums": [int(total) == int(labels.sum()), int(count) == int(rolled.sum())],
        "slope apart": float((slopes[0] - slopes[1]).abs().max()),
        "caller keeps its fields": all(vars(params)[name] is each for name, each in before.items()),
        "bits": bits(labels, rolled, slopes[0]),
    }


def loss(module: ModuleType, packing: Packing, mine: torch.Tensor, group: Any = None) -> dict[str, Any] | None:
    """Run the loss of two predictions forward and backward, for some of the tokens; None where no function has it."""
    if not hasattr(module, "process_mtp_loss"):
        return None
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(DEVICE)
    hidden = torch.randn(1 + LAYERS, packing.tokens, 1, HIDDEN, generator=generator).to(DEVICE)
    labels, mask = numbered(packing), packing.trained()
    found = weight.clone().requires_grad_()
    leaf = hidden[:, mine].flatten(0, 1).requires_grad_()
    module.MTPLossAutoScaler.set_loss_scale(torch.ones((), device=DEVICE))
    config = SimpleNamespace(
        mtp_num_layers=LAYERS, mtp_loss_scaling_factor=SCALE, calculate_per_token_loss=False, mtp_detach_heads=False
    )
    output = module.process_mtp_loss(
        hidden_states=leaf,
        labels=labels[:, mine],
        loss_mask=mask[:, mine],
        output_layer=lambda states, weight, **_: (states @ weight.T, None),
        output_weight=found,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=per_token,
        config=config,
        cp_group=group,
        packed_seq_params=packing.params(),
    )
    output.sum().backward()
    true, own = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    total = own[0, mine].sum()
    for layer in range(LAYERS):
        labels, mask = packing.rolled(labels), packing.rolled(mask)
        losses = per_token(labels[:, mine], own[layer + 1, mine] @ true.T) * mask[:, mine]
        total = total + SCALE / LAYERS * losses.sum() / mask[:, mine].sum().clamp(min=1)
    total.backward()
    return {
        "weights apart": relative(found.grad, true.grad),
        "activations apart": relative(leaf.grad, own.grad[:, mine].flatten(0, 1)),
        "bits": bits(found.grad, leaf.grad),
    }


def per_token(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, [1, tokens], of logits [tokens, 1, vocabulary]."""
    return torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")[None]


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).abs().max() / true.abs().max().clamp(min=1e-30))


def share(module: ModuleType, packing: Packing, group: Any) -> dict[str, Any]:
    """Roll this rank's share of a row."""
    ranks, rank = group.size(), torch.distributed.get_rank(group)
    mine = packing.share(ranks, rank)
    row, mask = numbered(packing), packing.trained()
    try:
        labels, _ = module.roll_tensor(row[:, mine], cp_group=group, packed_seq_params=packing.params())
        rolled, _ = module.roll_tensor(mask[:, mine], cp_group=group, packed_seq_params=packing.params())
    except IndexError as error:
        return {"raised": type(error).__name__}
    return {
        "wrong labels": int((labels != packing.rolled(row)[:, mine]).sum()),
        "wrong masks": int((rolled != packing.rolled(mask)[:, mine]).sum()),
        "bits": bits(labels, rolled),
        "loss": loss(module, packing, mine, group),
    }


def two_ranks(module: ModuleType, _rank: int) -> dict[str, Any]:
    """Share every row between all ranks."""
    return shares(module, SHARED, torch.distributed.group.WORLD)


def shares(module: ModuleType, names: tuple[str, ...], group: Any) -> dict[str, Any]:
    """Roll this rank's share of some rows, until one raises: messages sent before that are still on their way."""
    found: dict[str, Any] = {}
    for name in names:
        found[name] = share(module, PACKINGS[name], group)
        if "raised" in found[name]:
            break
    return found


def two_lanes(module: ModuleType, rank: int) -> dict[str, Any]:
    """Let two pairs of ranks roll rows of their own: other numbers of documents, and so of exchanges, at the same time."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    lane = rank // 2
    names = (("padded", "one document"), ("one document", "padded", "not padded", "first alone padded"))[lane]
    found = shares(module, names, groups[lane])
    together = torch.ones((), device=DEVICE)
    torch.distributed.all_reduce(together)
    return {"rows": found, "together": int(together)}


WAYS = {"two ranks": (2, two_ranks), "two lanes": (4, two_lanes)}


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    module = importlib.import_module(MODULE)
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    report: dict[str, Any] = {}
    for way in sys.argv[2:] or WAYS:
        ranks, run = WAYS[way]
        report[way] = on_ranks(ranks, Path(sys.argv[1], way), functools.partial(run, module))
    report |= {
        "decision": record.decision.value,
        "reason": record.reason,
        "rows": {name: roll(module, packing) for name, packing in PACKINGS.items()},
        "losses": {name: loss(module, each, torch.arange(each.tokens)) for name, each in PACKINGS.items()},
        "not packed": bits(*(module.roll_tensor(numbered(each))[0] for each in PACKINGS.values())),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
