"""Weights of multi-token predictions from the token counts of all ranks, for losses summed over tokens: off unless its variable is `on`.

With `calculate_per_token_loss` gradients are summed over data and context parallel ranks, and divided by the tokens of the main
loss. A multi-token prediction has fewer tokens, so upstream multiplies its loss by the tokens of the main loss
over its own. It counts both on the rank alone. Where ranks have unequal counts, a prediction then weighs more or less than the
mean over its tokens, and a context parallel rank without tokens of the main loss drops its targets.

Here both counts are summed over the ranks that gradients are summed over, two numbers for each prediction, and stay on the device.
Upstream's function runs with `calculate_per_token_loss` off: then it divides by the rank's count only. A scaling factor cancels this
division and applies the counts of all ranks. Logged values are upstream's. Everything is upstream's bit for bit on one rank, without
gradients, without `calculate_per_token_loss`, and with ranks that may run out of step: where context parallel groups are those of a row
or of a model, and not of the process.

The overlay is off by default because each forward pass of a last pipeline stage then waits for its data parallel ranks: those that run
unequal numbers of microbatches would wait for ever. Upstream does the same for `global_aux_loss` of MoE.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mtp_token_counts_local as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer


class _CurrentLoss(threading.local):
    """Thread-local: the loss that is being computed, if the overlay changes it."""

    loss: _WeightedLossConfig | None = None


_running = _CurrentLoss()


def _make_loss(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        group, before = _group(given.arguments, module), _running.loss
        _running.loss = None if group is None else _WeightedLossConfig(given.arguments, group, module.torch)
        if _running.loss is not None:
            given.arguments["config"] = _running.loss
        try:
            return original(*given.args, **given.kwargs)
        finally:
            _running.loss = before

    return process_mtp_loss


def _make_roll(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        rolled = original(*args, **kwargs)
        if _running.loss is not None:
            _running.loss.sums.append(rolled[1])
        return rolled

    return roll_tensor


def _group(given: dict[str, Any], module: ModuleType) -> Any:
    """Return the group over which gradients are summed, or None where upstream's counts are right or the case is not supported."""
    config, state = given["config"], module.parallel_state
    unequal = any(getattr(config, f"{each}_context_parallel", False) for each in ("hybrid", "dynamic"))
    if not config.calculate_per_token_loss or unequal or not module.torch.is_grad_enabled():
        return None
    if not state.model_parallel_is_initialized():
        return None
    own, row = given.get("cp_group"), getattr(given.get("packed_seq_params"), "cp_group", None)
    process = state.get_context_parallel_group()
    if any(each is not None and each is not process for each in (own, row)):
        return None
    group = state.get_data_parallel_group(with_context_parallel=True)
    return None if group.size() == 1 else group


class _WeightedLossConfig:
    """Proxy for the config of a loss that is weighted with the token counts of a group.

    Upstream reads the scaling factor once for each prediction, after it has rolled labels and then their mask.
    """

    calculate_per_token_loss = False

    def __init__(self, given: dict[str, Any], group: Any, torch: Any) -> None:
        self._given, self._group, self._torch = given.copy(), group, torch
        self.sums: list[Any] = []
        """Sums of all rolled tensors; the last one is the rank's number of tokens in this prediction."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given["config"], name)

    @property
    def mtp_loss_scaling_factor(self) -> Any:
        torch, own = self._torch, self.sums[-1].double()
        counts = torch.stack([self._main_tokens(own), own])
        torch.distributed.all_reduce(counts, group=self._group)
        weight = self._given["config"].mtp_loss_scaling_factor
        return weight * own.clamp(min=1) * counts[0] / counts[1].clamp(min=1)

    def _main_tokens(self, own: Any) -> Any:
        """Return the rank's number of tokens in the main loss."""
        labels, mask = self._given["labels"], self._given["loss_mask"]
        if labels is None:  # upstream rolls ids to labels, and the mask along
            return self.sums[1].double()
        return self._torch.full_like(own, labels.numel()) if mask is None else mask.sum().double()


_MASK, _LAYERS, _SCALE = (1.0, 1.0, 1.0, 0.0, 0.0), 2, 0.5
_OTHERS = (5.0, 2.0)
"""Tokens of another rank, in the main loss and in each further prediction."""
_ALL = ((8 / 4, 8 / 4, 0.0, 0.0, 0.0), (8 / 3, 0.0, 0.0, 0.0, 0.0))
"""Weight of each token in each prediction, by the counts of all ranks."""
_OWN = ((1 / 2, 1 / 2, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0))
"""The same without sums over tokens: a mean over the rank's tokens, as in upstream's main loss."""
_ENOUGH = 1e-6


def observe(module: ModuleType) -> Observation:
    """Compare the weights of tokens in further predictions on one of two simulated ranks, on the CPU, with those of both.

    The counts of the other rank are added in the sum over ranks. There is no communication, and no backward pass.
    """
    import torch

    seen, broken = [], False
    with torch.inference_mode(False), torch.enable_grad(), _one_of_two_ranks(module):
        for sums, expected in ((True, _ALL), (False, _OWN)):
            found = _weights(module, sums)
            shares = [_SCALE / _LAYERS * each for layer in expected for each in layer]
            broken |= len(found) != len(shares) or any(
                abs(one - other) > _ENOUGH for one, other in zip(found, shares, strict=False)
            )
            numbers = ", ".join(f"{each:.4f}" for each in found)
            seen.append(f"{numbers} {'with' if sums else 'without'} calculate_per_token_loss")
    return Observation(broken=broken, seen=f"tokens of two predictions on one of two ranks weigh {'; '.join(seen)}")


def _weights(module: ModuleType, sums: bool) -> list[float]:
    """Return the factor by which upstream multiplies the loss of each token, in each prediction."""
    import torch

    mask = torch.tensor(_MASK, dtype=torch.float32, device="cpu")[None]
    states = torch.ones((1 + _LAYERS) * len(_MASK), 1, 1, dtype=torch.float32, device="cpu", requires_grad=True)
    config = SimpleNamespace(
        mtp_num_layers=_LAYERS,
        mtp_loss_scaling_factor=_SCALE,
        mtp_detach_heads=False,
        calculate_per_token_loss=sums,
    )
    output = module.process_mtp_loss(
        hidden_states=states,
        labels=torch.zeros_like(mask, dtype=torch.int64),
        loss_mask=mask,
        output_layer=lambda hidden, **_: (hidden, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda _labels, logits: logits[..., 0].transpose(0, 1),
        config=config,
    )
    found: list[float] = []
    node = output.grad_fn
    while (kept := getattr(node, "saved_tensors", ())) and feature.SCALER in type(node).__name__:
        found = [*kept[0].flatten().tolist(), *found]  # the last prediction comes first
        node = node.next_functions[0][0]
    return found


@contextlib.contextmanager
def _one_of_two_ranks(module: ModuleType) -> Iterator[None]:
    """Replace the module's functions about ranks, in this thread, by those of one of two ranks."""
    import torch

    group = SimpleNamespace(size=lambda: 2)

    def all_reduce(tensor: Any, **_: Any) -> None:
        tensor += torch.tensor(_OTHERS, dtype=tensor.dtype, device="cpu")

    theirs, state = module.torch, module.parallel_state
    distributed = Instead(theirs.distributed, all_reduce=answer(all_reduce, theirs.distributed.all_reduce))
    answers: dict[str, Callable[..., Any]] = {
        "model_parallel_is_initialized": lambda: True,
        "get_context_parallel_group": lambda: None,
        "get_data_parallel_group": lambda **_: group,
    }
    names = vars(module)
    try:
        names["torch"] = Instead(theirs, distributed=distributed)
        names["parallel_state"] = Instead(
            state, **{name: answer(ours, getattr(state, name)) for name, ours in answers.items()}
        )
        yield
    finally:
        names.update(torch=theirs, parallel_state=state)


OVERLAY = Overlay(
    id="mtp-token-counts-local",
    pack=27,
    title="weigh multi-token predictions with the tokens of all ranks where losses are summed over tokens",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.LOCAL: (
            Replacement(symbol=feature.LOSS, make=_make_loss),
            Replacement(symbol=feature.ROLL, make=_make_roll),
        ),
    },
    unsupported={
        feature.LOCAL_OF_LISTS: "dev asks the config for the sum over tokens where it logs, too, and cuts rows for groups of their "
        "own: take main or a release, or give each rank as many tokens"
    },
    witness=observe,
    self_test=observe,
    opt_in=True,
    symptoms=(
        "MTP loss depends on the number of ranks",
        "mtp loss is different with context parallelism",
        "MTP weighs ranks with few tokens too much",
    ),
    concerns="mtp and per_token_loss",
    breaks="with calculate_per_token_loss multi-token predictions weigh the more the fewer tokens a rank has, or nothing at all",
    brief="weights of MTP losses over ranks",
    until="process_mtp_loss counts all tokens",
    retire_when="process_mtp_loss takes original_num_tokens and num_tokens from all ranks that gradients are summed over",
    threads=(
        Thread(
            repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17, seen 2026-11-23: finding 3"
        ),
        Thread(repository="NVIDIA/Megatron-LM", number=7570, state="open, opened 2026-09-22, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=7498, state="open, opened 2026-09-18, seen 2026-11-23"),
        Thread(repository="NVIDIA/Megatron-LM", number=3159, state="merged 2026-02-17, counts on the rank alone"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.17.1, 0.18.2 and 0.19.2 and main d98e8a64dd on two "
    "and four gloo ranks; 0.12.0 to 0.19.2 and dev d48bd6be0a read. H200, two NCCL ranks: 0.19.2",
)
