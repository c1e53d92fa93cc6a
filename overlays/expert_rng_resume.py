"""Random streams of expert ranks in checkpoints, one for each rank.

Ranks that share a pipeline and a tensor rank save one object. The seam adds the expert streams of all of them, by expert and expert tensor rank, and a rank that loads it
takes its own. Where a checkpoint has none for a rank, because upstream saved it or fewer ranks did, the rank keeps the stream that it was seeded with; the first rank keeps the saved one.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6858
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import expert_rng_resume as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer

KEY = "expert_rng_states"
"""Key of the expert streams in the first dictionary of `rng_state`: states by (expert rank, expert tensor rank)."""
_TRACKED = "rng_tracker_states"


def _own(mpu: Any) -> tuple[int, int]:
    return mpu.get_expert_model_parallel_rank(), mpu.get_expert_tensor_parallel_rank()


def _gathered(module: Any, group: Any) -> dict[tuple[int, int], Any]:
    """Return the expert streams of a data and context parallel group, in the order of its ranks; none where all are the same."""
    mpu, parallel, distributed = module.mpu, module.tensor_parallel, module.torch.distributed
    state = parallel.get_cuda_rng_tracker().get_states().get(parallel.get_expert_parallel_rng_tracker_name())
    if state is None or not distributed.is_initialized():
        return {}
    of_tensors = mpu.get_expert_tensor_parallel_world_size() != mpu.get_tensor_model_parallel_world_size()
    if mpu.get_expert_model_parallel_world_size() <= 1 and not of_tensors:
        return {}
    group = group or mpu.get_data_parallel_group(with_context_parallel=True)
    found: list[Any] = [None] * group.size()
    distributed.all_gather_object(found, (_own(mpu), parallel.convert_cuda_rng_state(state)), group=group)
    streams: dict[tuple[int, int], Any] = {}
    for own, each in found:
        streams.setdefault(own, each)
    return streams


def _the_one(states: Any) -> dict[str, Any] | None:
    """Return the states that ranks share; None where data parallel ranks have their own, or the format is another one."""
    return states[0] if isinstance(states, list) and len(states) == 1 and isinstance(states[0], dict) else None


def _make_saved(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    arguments = inspect.signature(original)

    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        state = _the_one(getattr(found, "data", None))
        if state is not None:
            streams = _gathered(module, arguments.bind(*args, **kwargs).arguments.get("dp_cp_group"))
            state.update({KEY: streams} if streams else {})
        return found

    return get_rng_state


def _make_read(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    arguments = inspect.signature(original)

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        asked = arguments.bind(*args, **kwargs).arguments.get("sharded_state_dict") or {}
        now = (_the_one(getattr(asked.get("rng_state"), "data", None)) or {}).get(KEY)
        found = original(*args, **kwargs)
        state = _the_one((found[0] or {}).get("rng_state")) or {}
        saved, tracked = state.pop(KEY, {}), state.get(_TRACKED)
        if now and tracked:
            own, (first, *_) = _own(module.mpu), now
            name = module.tensor_parallel.get_expert_parallel_rng_tracker_name()
            tracked[name] = saved[own] if own in saved else tracked.get(name, now[own]) if own == first else now[own]
        return found

    return _load_base_checkpoint


def observe(module: Any) -> Observation:
    """Save the streams of two expert ranks as the first of them does, and load them as the second does."""
    import torch

    name, (first, second) = "expert-parallel-rng", (torch.full((1,), each, device="cpu") for each in (1, 2))
    rank, saved = [0], dict[str, Any]()

    def gather(found: list[Any], _own: Any, group: Any) -> None:
        found[:] = ((0, 0), first), ((1, 0), second)

    def answering(original: Any, **answers: Any) -> Any:
        return Instead(original, **{key: answer(each, getattr(original, key)) for key, each in answers.items()})

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    cpu, theirs = torch.get_rng_state, module.torch
    sizes = {
        f"get_{each}_world_size": lambda: 1
        for each in ("tensor_model_parallel", "expert_tensor_parallel", "data_parallel")
    }
    names = {
        "torch": Instead(
            theirs,
            cuda=answering(theirs.cuda, get_rng_state=cpu),
            distributed=answering(theirs.distributed, is_initialized=lambda: True, all_gather_object=gather),
        ),
        "mpu": answering(
            module.mpu,
            **sizes,
            get_expert_model_parallel_world_size=lambda: 2,
            get_expert_model_parallel_rank=lambda: rank[0],
            get_expert_tensor_parallel_rank=lambda: 0,
            get_data_parallel_rank=lambda **_: 0,
            get_data_parallel_group=lambda **_: group,
        ),
        "tensor_parallel": answering(
            module.tensor_parallel,
            get_cuda_rng_tracker=lambda: SimpleNamespace(get_states=lambda: {name: (first, second)[rank[0]]}),
        ),
    }
    functions: dict[str, Callable[..., Any]] = {
        "get_args": lambda: SimpleNamespace(data_parallel_random_init=False),
        "set_loaded_iteration": lambda _: None,
        "_get_non_persistent_iteration": lambda *_: 0,
        "_load_non_persistent_base_checkpoint": lambda *_, **__: ({"rng_state": [dict(saved)]}, "", False, None),
    }
    before = {each: vars(module)[each] for each in (*names, *functions) if each in vars(module)}
    arguments = SimpleNamespace(non_persistent_global_ckpt_dir=None, ckpt_step=None)
    vars(module).update(names, **{each: answer(functions[each], before[each]) for each in functions if each in before})
    try:
        saved.update(getattr(module, feature.SAVED)("torch_dist", group, group).data[0])
        rank[0] = 1
        asked = {"rng_state": getattr(module, feature.SAVED)("torch_dist", group, group)}
        loaded, *_ = getattr(module, feature.READ)(None, arguments, sharded_state_dict=asked)
    finally:
        vars(module).update(before)
    found = loaded["rng_state"][0][_TRACKED][name].item()
    return Observation(
        broken=found != 2, seen=f"the second of two expert ranks, whose stream is 2, loads stream {found}"
    )


OVERLAY = Overlay(
    id="expert-rng-resume",
    pack=52,
    title="let each expert rank resume with its own random stream",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.REPLICAS: (
            Replacement(symbol=feature.SAVED, make=_make_saved),
            Replacement(symbol=feature.READ, make=_make_read),
        )
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "a resumed MoE run differs from one that was not interrupted",
        "router noise or expert dropout is the same on all expert parallel ranks after resume",
        "`expert-parallel-rng` differs from the saved value after loading a checkpoint",
    ),
    concerns="experts",
    breaks="after a resume all expert parallel ranks draw the random numbers of the first one, for the rest of the run",
    brief="random streams of resumed experts",
    until="checkpoints have a stream for each rank",
    retire_when="checkpoints of megatron.training have the expert stream of each expert rank",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=6858, state="merged, opened 2026-08-25, in no release"),),
    last_validated="2026-11-27, x86-64 without GPU, torch 2.11.0, two gloo ranks: megatron-core 0.18.2 and 0.19.2; 0.17.0 to "
    "0.19.2 and main d98e8a64dd read",
)
