"""Weigh further predictions of Megatron with the tokens of all ranks where losses are summed over tokens: off unless its variable says `on`.

With `calculate_per_token_loss` gradients are summed over data and context parallel ranks, and divided by the tokens of the main
loss. A multi-token prediction has fewer tokens, which upstream makes up for: its loss is multiplied by the tokens of the main loss
over its own. It counts both on the rank alone. Where ranks have unequal shares, a prediction then weighs more or less than the
mean over its tokens; and a context parallel rank that has none of the main loss throws its targets away.

Here both counts are summed over the ranks that gradients are summed over, two numbers for each prediction, and stay on the device.
Upstream's function runs, with a config that does not ask for the sum over tokens: then it divides by the rank's count and by
nothing else, and a scaling factor takes that back and holds the counts of all. What is logged is upstream's. So is, bit for bit,
everything on one rank, and all that is without gradients, without `calculate_per_token_loss`, or with ranks that need not
keep step: where context parallel groups are those of a row or of a model, and not of the process.

It is off by default because each forward pass of a last pipeline stage then waits for its data parallel ranks: those that run unequal
numbers of microbatches would wait for ever. Upstream does the same for `global_aux_loss` of MoE.
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


class _Running(threading.local):
    """The loss that a thread computes right now, if it is one that is repaired."""

    loss: _Counted | None = None


_running = _Running()


def _make_loss(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        group, before = _group(given.arguments, module), _running.loss
        _running.loss = None if group is None else _Counted(given.arguments, group, module.torch)
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
    """Return the ranks whose gradients are summed, or None where upstream's counts are right or must do."""
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


class _Counted:
    """The config of a loss that is weighed with the tokens of a group.

    Upstream reads the scaling factor once for each prediction, after it has rolled labels and then their mask.
    """

    calculate_per_token_loss = False

    def __init__(self, given: dict[str, Any], group: Any, torch: Any) -> None:
        self._given, self._group, self._torch = given.copy(), group, torch
        self.sums: list[Any] = []
        """Of everything that was rolled: the last is how many tokens the rank has in this prediction."""

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
        """Return how many tokens the rank has in the main loss."""
        labels, mask = self._given["labels"], self._given["loss_mask"]
        if labels is None:  # upstream rolls ids to labels, and the mask along
            return self.sums[1].double()
        return self._torch.full_like(own, labels.numel()) if mask is None else mask.sum().double()


_MASK, _LAYERS, _SCALE = (1.0, 1.0, 1.0, 0.0, 0.0), 2, 0.5
_OTHERS = (5.0, 2.0)
"""Tokens of another rank, in the main loss and in each further prediction."""
_ALL = ((8 / 4, 8 / 4, 0.0, 0.0, 0.0), (8 / 3, 0.0, 0.0, 0.0, 0.0))
"""What a token weighs in each prediction, of all tokens."""
_OWN = ((1 / 2, 1 / 2, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0))
"""And where losses are no sums over tokens: a mean over those of the rank, as upstream's main loss is."""
_ENOUGH = 1e-6


def observe(module: ModuleType) -> Observation:
    """Let one process play one of two ranks on the CPU: does a token of a further prediction weigh what it does for both?

    The counts of the other rank are added where they are asked for. Nothing is sent, and nothing goes back.
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
    """Return what upstream multiplies the loss of each token with, in each prediction."""
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
    """Let what this thread asks of the module about its ranks be answered as for one of two."""
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
