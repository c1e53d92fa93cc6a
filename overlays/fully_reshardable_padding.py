"""Offsets of parameters in the fully reshardable checkpoints of `DistributedOptimizer`, without padding of buckets.

The state of a grad buffer is gathered without the padding at the ends of its buckets, but cut with offsets that include the padding.
From the second bucket on every parameter gets the fp32 weights and moments of later parameters, and the last ones get zeros.
Loading goes by parameter, so even the layout that wrote such a checkpoint does not read back its own state.

There are two seams around upstream's own code. While upstream cuts, it gets index maps without the padding; where no bucket has
padding, it is called unchanged. Before upstream loads, the fp32 weights of the checkpoint are compared with the weights of the
model: a checkpoint that was written broken is refused with the names of the wrong parameters. They are found by the marks in
`megacpp_overlays.runtime.displaced_masters`. A model whose weights were not loaded before its optimizer, or are
quantized, cannot be compared and is not refused. `megacpp-overlays checkpoint` reads the files alone.

State that ends in zeros is no reason to refuse a parameter that may have grown: upstream fills missing rows of a checkpoint with
zeros, and the model's new rows may have been initialised already. Parameters that may grow have `allow_shape_mismatch` in the
sharded tensors that upstream makes for loading.

Other formats are not changed (`dp_reshardable`, `fully_sharded_model_space`, `dp_zero_gather_scatter`, `fsdp_dtensor`): other code
cuts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.errors import CheckpointError
from megacpp_overlays.feature_probes.fully_reshardable_padding import LOAD, PADDED_SLICES, SAVE, TARGET, probe
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_NAMED = 8
"""Most parameters that an error names."""
_of_fixed_size: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""For each optimizer, the numbers of the parameters with the same shape in every checkpoint that can be loaded."""


class _AttributeProxy:
    """Proxy for an object with some attributes replaced."""

    def __init__(self, real: Any, **other: Any) -> None:
        vars(self).update(_real=real, **other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _cut_without_padding(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        stripped = [stripped_before(buffer) for buffer in self.buffers]
        seen = self
        if any(map(any, stripped)):
            buffers = [
                _AttributeProxy(buffer, param_index_map=compact_index_map(buffer, before))
                for buffer, before in zip(self.buffers, stripped, strict=True)
            ]
            # A proxy and not a temporary attribute: other code that reads the buffers meanwhile, such as the gathering,
            # needs them unchanged.
            seen = _AttributeProxy(self, buffers=buffers)
        state = original(seen, *args, **kwargs)
        _of_fixed_size[self] = of_fixed_size(state)
        return state

    return sharded_param_state_fully_reshardable


def stripped_before(buffer: Any) -> list[int]:
    """Return for each bucket of a grad buffer the number of padding elements before it that the gathered state lacks."""
    paddings = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    return [sum(paddings[:number]) for number in range(len(paddings))]


def compact_index_map(buffer: Any, stripped: list[int]) -> dict[Any, tuple[int, int, int]]:
    """Return the position of each parameter in the gathered state: start, stop, bucket.

    Raises:
        CheckpointError: a parameter would lie outside of its bucket, so the layout is unknown.
    """
    found: dict[Any, tuple[int, int, int]] = {}
    starts = [sum(bucket.numel_unpadded for bucket in buffer.buckets[:number]) for number in range(len(stripped))]
    for parameter, (start, stop, bucket) in buffer.param_index_map.items():
        moved = start - stripped[bucket], stop - stripped[bucket]
        end = starts[bucket] + buffer.buckets[bucket].numel_unpadded
        if not starts[bucket] <= moved[0] <= moved[1] <= end:
            raise CheckpointError(
                f"the optimizer state of a parameter of shape {tuple(parameter.shape)} cannot be saved as "
                f"fully_reshardable: it would be read from {moved[0]} to {moved[1]}, and its bucket lies from "
                f"{starts[bucket]} to {end}"
            )
        found[parameter] = (*moved, bucket)
    return found


def _refuse_what_was_written_broken(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def load_parameter_state_from_fully_reshardable(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, state_dict, _of_fixed_size.get(self, frozenset()))
        return original(self, state_dict, *args, **kwargs)

    return load_parameter_state_from_fully_reshardable


def of_fixed_size(state: Any) -> frozenset[int]:
    """Return the numbers of the parameters in a sharded state whose size in a checkpoint must be their present size.

    Args:
        state: sharded tensors by the number of a parameter and by `param`, `exp_avg` and so on; None where another rank saves.
    """
    entries = state.items() if hasattr(state, "items") else ()
    return frozenset(
        number
        for number, entry in entries
        if isinstance(number, int) and not getattr(entry.get("param"), "allow_shape_mismatch", True)
    )


def check(optimizer: Any, state: Any, fixed: Collection[int] = ()) -> None:
    """Compare the fp32 weights of a checkpoint with the weights of the model, for this rank's range of each parameter.

    Args:
        optimizer: a `DistributedOptimizer` whose model was loaded.
        state: the loaded state: by the number of each parameter `param` (fp32, in the parameter's shape) and moments.
        fixed: numbers of parameters that cannot have grown, so that zeros at their end show a broken checkpoint.

    Raises:
        CheckpointError: they were written broken.
    """
    from megacpp_overlays.runtime.displaced_masters import TensorValues, first_difference, has_many_numbers, marks

    shown: list[str] = []
    others: list[str] = []
    is_loaded = False
    for number, parameter, owned in _owned(optimizer):
        entry = state.get(number, {}) if hasattr(state, "get") else state[number]
        weight, read = _plain(parameter), entry.get("param")
        if weight is None or read is None or read.numel() != weight.numel():
            continue
        master = TensorValues(read)
        if first_difference(master, TensorValues(weight), owned.start, owned.end) is None:
            is_loaded = is_loaded or has_many_numbers(TensorValues(weight), owned.end, owned.start)
            continue
        rest = [
            TensorValues(each)
            for key, each in entry.items()
            if key not in {"param", "step"} and hasattr(each, "reshape")
        ]
        found = marks(master, TensorValues(weight), rest)
        name = _name_of(optimizer, parameter)
        if found.displaced_by:
            shown.append(f"{name} ({found.displaced_by} elements displaced)")
        elif found.zero_tail and number in fixed:
            others.append(f"{name} ({found.zero_tail} zeros at its end)")
    # Zeros alone are no sign where the model may be another one: an embedding can be padded with them.
    if shown or (others and is_loaded):
        wrong = [*shown, *others]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise CheckpointError(
            "this checkpoint was written by a megatron-core that saves the optimizer state of other parameters in the "
            f"place of: {', '.join(wrong[:_NAMED])}{more}; parameters too small to be checked are as wrong. The model's "
            "weights are right: load it without its optimizer state, or take another checkpoint that "
            "`megacpp-overlays checkpoint` calls right"
        )


def _owned(optimizer: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield each parameter of which this rank owns a range, as number, parameter and range, in upstream's order."""
    number = -1
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for buckets in by_dtype.values():
            ranges = {each: found for bucket in buckets for each, found in bucket["param_map"].items()}
            for parameter in buffer.param_index_map:
                number += 1
                if parameter in ranges:
                    yield number, parameter, ranges[parameter]["param"]


def _plain(parameter: Any) -> Any:
    """Return the values of a parameter; None where they are quantized or of another type than bf16, fp16 and fp32."""
    import torch

    data = parameter.data
    return data if type(data) is torch.Tensor and data.dtype in {torch.bfloat16, torch.float16, torch.float32} else None


def _name_of(optimizer: Any, parameter: Any) -> str:
    for model in getattr(optimizer, "model_chunks", ()):
        for name, each in model.named_parameters():
            if each is parameter:
                return str(name)
    return f"a parameter of shape {tuple(parameter.shape)}"


def observe(module: ModuleType) -> Observation:
    """Observe the saved state of two parameters in two buckets, the first of them padded, for a given gathered state.

    The constructor needs process groups and CUDA tensors, so the instance is built without it. The second bucket is longer
    than its parameter, so that upstream does not fill up with zeros and warn.
    """
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def numbers(*values: float) -> Any:
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    first, second = (torch.nn.Parameter(numbers(0, 0)) for _ in range(2))
    gathered = numbers(1, 2, 3, 4, 5, 6)
    buckets = [
        SimpleNamespace(grad_data=torch.empty(padded, device="cpu"), numel_unpadded=unpadded)
        for padded, unpadded in ((4, 2), (4, 4))
    ]
    buffer = SimpleNamespace(buckets=buckets, numel_unpadded=6, param_index_map={first: (0, 2, 0), second: (4, 6, 1)})
    optimizer = object.__new__(module.DistributedOptimizer)
    vars(optimizer).update(
        buffers=[buffer],
        gbuf_ranges=[{torch.float32: []}],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: {"param": gathered, "numel_unpadded": 6}}},
    )
    model = {name: ShardedTensor.from_rank_offsets(name, each) for name, each in (("a", first), ("b", second))}
    state = optimizer.sharded_param_state_fully_reshardable(model, metadata={})
    saved = [state[number]["param"].data.tolist() for number in (0, 1)]
    return Observation(
        broken=saved != [[1.0, 2.0], [3.0, 4.0]],
        seen=f"of 1 to 6 in two buckets, the first one padded by 2, two parameters are saved as {saved}",
    )


OVERLAY = Overlay(
    id="fully-reshardable-padding",
    pack=23,
    title="Fully reshardable checkpoints of DistributedOptimizer hold the state of each parameter under its own name",
    target=TARGET,
    probe=probe,
    replacements={
        PADDED_SLICES: (
            Replacement(symbol=f"{TARGET.symbol}.{SAVE}", make=_cut_without_padding),
            Replacement(symbol=f"{TARGET.symbol}.{LOAD}", make=_refuse_what_was_written_broken),
        ),
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loss jumps after resume from a fully_reshardable checkpoint",
        "optimizer state is that of other parameters after loading a checkpoint",
        "fp32 weights are zeros in a checkpoint",
    ),
    concerns="distributed_optimizer",
    breaks="a fully reshardable checkpoint holds the fp32 weights and moments of other parameters, or zeros, without a word",
    brief="checkpoints with a neighbour's state",
    until="saving subtracts the padding",
    retire_when="sharded_param_state_fully_reshardable subtracts the padding that get_parameter_state_dp_zero leaves out",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5077, state="merged to main 2026-08-21, unreleased"),
        Thread(
            repository="NVIDIA/Megatron-LM", number=6342, state="the same repair, last commit 2026-08-07, not merged"
        ),
    ),
    last_validated="2026-11-22, x86-64 without GPU, torch 2.11.0: checkpoints of 1 to 3 ranks through files with megatron-core 0.19.2, "
    "of one with 0.15.0, 0.16.1, 0.17.1 and 0.18.2; main d98e8a64dd and dev d48bd6be0a loaded; 0.15.0 to 0.19.2 read",
)
