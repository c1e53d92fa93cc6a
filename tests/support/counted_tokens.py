"""Run in a fresh interpreter: gradients of multi-token prediction with `calculate_per_token_loss` on four ranks; JSON.

    python tests/support/counted_tokens.py FOLDER [briefly]

The release is the one that is first on the path; MEGACPP_OVERLAY_MTP_TOKEN_COUNTS_LOCAL=on must switch the overlay on. Ranks are
forked, and meet in the folder as `forked_ranks` says. Each measures with that overlay and the one of padded rows, with either, and with
neither. Gradients and tokens are summed over ranks, and divided by each other, as `finalize_model_grads` does. The expected result is
the mean over all tokens of each prediction, of rows that no rank shares.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, ON_CPU, at_most, bits, on_ranks
from rolled_rows import HIDDEN, LAYERS, SCALE, VOCABULARY, Packing, relative

from megacpp_overlays.feature_probes.mtp_roll_padded_boundaries import UNPADDED
from megacpp_overlays.feature_probes.mtp_token_counts_local import LOCAL, TARGET
from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.overlays import mtp_roll_padded_boundaries, mtp_token_counts_local

RANKS = at_most(4)
COUNTS, ROLLS = mtp_token_counts_local.OVERLAY, mtp_roll_padded_boundaries.OVERLAY
STATES = {
    "both": ((COUNTS, LOCAL), (ROLLS, UNPADDED)),
    "counts": ((COUNTS, LOCAL),),
    "rolls": ((ROLLS, UNPADDED),),
    "neither": (),
}
DOCUMENTS = {"packed": Packing((8, 4, 8)), "padded": Packing((5, 3, 7), padded=(8, 4, 8))}
ROW = Packing((16,))
"""A row that is not packed."""


class Share:
    """The rows of one data parallel rank, of which a context parallel rank has a part."""

    def __init__(self, packing: Packing, kept: Callable[[torch.Tensor], torch.Tensor], replica: int) -> None:
        numbers = torch.Generator().manual_seed(7 + replica)
        self.packing = packing
        self.labels = torch.randint(VOCABULARY, (1, packing.tokens), generator=numbers).to(DEVICE)
        self.mask = kept(packing.trained()) if replica else packing.trained()
        self.hidden = torch.randn(1 + LAYERS, packing.tokens, 1, HIDDEN, generator=numbers).to(DEVICE)

    def predictions(
        self, weight: torch.Tensor, shifted: int, rolled: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the losses of each prediction in sum, and its tokens."""
        labels, mask = self.labels, self.mask
        for _ in range(shifted):
            labels, mask = rolled(labels), rolled(mask)
        found = []
        for layer in range(LAYERS):
            labels, mask = rolled(labels), rolled(mask)
            found.append(((per_token(labels, self.hidden[layer + 1] @ weight.T) * mask).sum(), mask.sum()))
        return found


def every_other(mask: torch.Tensor) -> torch.Tensor:
    return mask * (torch.arange(mask.size(-1), device=DEVICE) % 2)


def three(mask: torch.Tensor) -> torch.Tensor:
    """Keep tokens of the second chunk alone: where two ranks share a row of 16, the first has a target and no token of the main loss."""
    place = torch.arange(mask.size(-1), device=DEVICE)
    return mask * ((place >= 4) & (place < 7))


def nothing(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(mask)


WAYS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "row": ("row", every_other),
    "row, few": ("row", three),
    "row, nothing": ("row", nothing),
    "row, ids": ("row", every_other),
    "packed": ("packed", every_other),
    "padded": ("padded", every_other),
}


def measure(module: ModuleType, way: str, **asked: Any) -> dict[str, Any]:
    """Run the loss of two predictions forward and backward, for this rank's part of its row."""
    from megatron.core import parallel_state

    kind, kept = WAYS[way]
    group = parallel_state.get_context_parallel_group()
    packing = ROW if kind == "row" else DOCUMENTS[kind]
    shares = [Share(packing, kept, replica) for replica in range(RANKS // group.size())]
    own = shares[parallel_state.get_data_parallel_rank()]
    mine = (
        packing.share(group.size(), group.rank()) if group.size() > 1 else torch.arange(packing.tokens, device=DEVICE)
    )
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    ids = way.endswith("ids")
    mask = own.mask[:, mine]
    found, states = weight.clone().requires_grad_(), own.hidden[:, mine].flatten(0, 1).requires_grad_()
    run(module, found, states, own, mine, ids=ids, packed=kind != "row", **asked).sum().backward()
    main = module.roll_tensor(mask, cp_group=group)[0].sum() if ids else mask.sum()
    assert found.grad is not None
    assert states.grad is not None
    summed = torch.cat([found.grad.flatten(), main[None]])
    torch.distributed.all_reduce(summed)
    gradient = (summed[:-1] / summed[-1]).view_as(weight)
    report = {
        "tokens": float(summed[-1]),
        "own tokens": float(main),
        "apart": relative(gradient, truth(weight, shares, int(ids), packing.rolled)),
        "finite": bool(gradient.isfinite().all() and states.grad.isfinite().all()),
        "bits": bits(found.grad, states.grad),
    }
    if kind == "padded" and group.size() == 1:

        def rolled(values: torch.Tensor) -> torch.Tensor:
            whole: torch.Tensor = module.roll_tensor(values, packed_seq_params=packing.params())[0]
            return whole

        report["apart from its own rolls"] = relative(gradient, truth(weight, shares, int(ids), rolled))
    return report


def truth(
    weight: torch.Tensor, shares: list[Share], shifted: int, rolled: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of the mean over all tokens of each prediction."""
    leaf = weight.clone().requires_grad_()
    losses = torch.zeros((), device=DEVICE)
    every = [each.predictions(leaf, shifted, rolled) for each in shares]
    for layer in zip(*every, strict=True):
        losses = losses + SCALE / LAYERS * sum(loss for loss, _ in layer) / sum(tokens for _, tokens in layer)
    losses.backward()
    assert leaf.grad is not None
    return leaf.grad


def run(
    module: ModuleType,
    weight: torch.Tensor,
    states: torch.Tensor,
    share: Share,
    mine: torch.Tensor,
    *,
    ids: bool = False,
    packed: bool = False,
    sums: bool = True,
    group: Any = None,
    **config: Any,
) -> torch.Tensor:
    """Return the result of the module's own function for a part of a share."""
    from megatron.core import parallel_state

    labels = share.labels[:, mine]
    module.MTPLossAutoScaler.set_loss_scale(torch.ones((), device=DEVICE))
    return module.process_mtp_loss(
        hidden_states=states,
        labels=None if ids else labels,
        loss_mask=share.mask[:, mine],
        output_layer=OutputLayer(),
        output_weight=weight,
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=per_token,
        config=SimpleNamespace(
            mtp_num_layers=LAYERS,
            mtp_loss_scaling_factor=SCALE,
            calculate_per_token_loss=sums,
            mtp_detach_heads=False,
            **config,
        ),
        cp_group=group or parallel_state.get_context_parallel_group(),
        packed_seq_params=share.packing.params() if packed else None,
        **({"input_ids": labels} if ids else {}),
    )


class OutputLayer:
    gather_output = True

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return states @ weight.T, None


def per_token(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, [1, tokens], of logits [tokens, 1, vocabulary]."""
    return torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")[None]


@contextlib.contextmanager
def repaired(module: ModuleType, state: str) -> Iterator[None]:
    """Put the seams of a state in, and no others."""
    with contextlib.ExitStack() as placed:
        for overlay, shape in STATES[state]:
            for replacement in overlay.replacements[shape]:
                owner, name = live_names.resolve(module, replacement.symbol)
                make = replacement.make
                seam = seams.replace(owner, name, lambda f, make=make: make(f, module), overlay_id=overlay.id)
                placed.callback(seam.undo)
        yield


def facts(module: ModuleType, context: int) -> dict[str, Any]:
    """Return the measurements of this rank in every state, by way."""
    tracker = module.MTPLossLoggingHelper.tracker
    takes_ids = "input_ids" in inspect.signature(module.process_mtp_loss).parameters
    found: dict[str, Any] = {}
    for state in ("both", "neither") if "briefly" in sys.argv else STATES:
        with repaired(module, state):
            found[state] = {}
            for way in WAYS:
                if (way.endswith("ids") and not takes_ids) or (way == "row, few" and context == 1):
                    continue
                if not way.startswith("row") and context == 4:
                    continue  # documents are too short for eight chunks
                tracker.clear()
                found[state][way] = measure(module, way)
                found[state][way]["logged"] = bits(*(each for each in tracker.values() if torch.is_tensor(each)))
            found[state]["means"] = measure(module, "row", sums=False)
            found[state]["unequal"] = measure(module, "row", hybrid_context_parallel=True)
    return found


def _on_rank(module: ModuleType) -> dict[str, Any]:
    """Return the measurements of a rank."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for ranks in (1, 2) if "briefly" in sys.argv else sorted({1, 2, RANKS}):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        found[str(ranks)] = facts(module, ranks)
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    found["alone"] = {}
    for state in STATES:
        with repaired(module, state):
            found["alone"][state] = alone(module)
    return found


def alone(module: ModuleType) -> str:
    """Return the bits of a row that one rank has for itself."""
    share = Share(ROW, every_other, 1)
    weight = torch.ones(VOCABULARY, HIDDEN, device=DEVICE, requires_grad=True)
    states = share.hidden.flatten(0, 1).requires_grad_()
    run(module, weight, states, share, torch.arange(ROW.tokens, device=DEVICE)).sum().backward()
    return bits(weight.grad, states.grad)  # type: ignore[arg-type]


def main() -> None:
    """Answer on standard output."""
    torch.set_num_threads(1)
    if ON_CPU:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value] # upstream moves tensors there
    module = importlib.import_module(TARGET.module)
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == COUNTS.id)
    answer = {"decision": record.decision.value, "reason": record.reason}
    megacpp_overlays.undo()
    sys.stdout.write(json.dumps({**answer, "ranks": on_ranks(RANKS, Path(sys.argv[1]), lambda _: _on_rank(module))}))


if __name__ == "__main__":
    main()
