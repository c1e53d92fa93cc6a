"""Explicit tensor parallel groups of Megatron's modules, used by the helpers that they call in place of the default group.

Upstream's helpers use the default group of the process where they get no group. A cross attention builds its projections in it, a
multi-latent attention gathers latents, LLaVA splits embeddings, and blocks and prediction layers distribute activations that they
save for recomputation. Where the groups of a model differ from those of the process, unrelated ranks exchange values.

While one of these modules runs, a thread-local variable holds the group that the module was given, and a helper without a group uses
it. Upstream's functions run unchanged. Saved activations keep their group until they are gathered. The variable is unset while a
recomputed function runs. With the default groups nothing differs from upstream.

The variable is restored after each call, so calls may be nested. `torch.compile` can read and set it.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import explicit_tp_groups as feature
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.in_this_thread import answer
from megacpp_overlays.source.trees import SourceTree

_here = threading.local()
"""`group`: the group for helpers that get none; unset or None without one."""
_KEPT = "_explicit_tp_group"
"""Attribute of the context of a checkpoint that holds the group of its saved activations."""


def _noted(group: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the thread's group set to this one, or to None."""
    before = getattr(_here, "group", None)
    _here.group = group
    try:
        return function(*args, **kwargs)
    finally:
        _here.group = before


def _given(holder: Any) -> Any:
    """Return the tensor parallel group that a module or call was given, by the attribute names of all releases."""
    for name in ("pg_collection", "model_comm_pgs"):
        if (groups := getattr(holder, name, None)) is not None:
            return getattr(groups, "tp", None)
    return getattr(holder, "tp_group", None)


def _helper(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def get_tensor_model_parallel_group_if_none(
        tp_group: Any, is_expert: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if tp_group is None and not is_expert and (noted := getattr(_here, "group", None)) is not None:
            return noted
        return original(tp_group, is_expert, *args, **kwargs)

    return get_tensor_model_parallel_group_if_none


def _running(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(_given(self), original, self, *args, **kwargs)

    return run


def _constructing(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is upstream's
        given = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
        _noted(_given(given), original, *args, **kwargs)

    return __init__


def _saving(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def checkpointed(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if not config.distribute_saved_activations or config.fp8 or getattr(config, "fp4", None):
            return original(self, *args, **kwargs)  # nothing is distributed, or Transformer Engine does it
        return _noted(_given(self), original, self, *args, **kwargs)

    return checkpointed


def _cutting(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def forward(ctx: Any, run_function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        group = getattr(_here, "group", None) if distribute_saved_activations else None
        if group is None:
            return original(ctx, run_function, distribute_saved_activations, *args)
        setattr(ctx, _KEPT, group)

        def run(*given: Any) -> Any:
            return _noted(None, run_function, *given)

        return original(ctx, run, distribute_saved_activations, *args)

    return forward


def _gathering(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _noted(getattr(ctx, _KEPT, None), original, ctx, *gradients)

    return backward


class _EndOfCall(Exception):  # noqa: N818 - it is no error
    """Signal that ends a call of upstream once the thread's group was recorded."""


class _GroupRecorder:
    """Stub with groups, and a config that distributes activations. Any other attribute records the thread's group and ends the call.

    The helper itself has a separate observation, because the parts of the overlay are installed one by one, in any order.
    """

    def __init__(self, found: list[Any], **known: Any) -> None:
        vars(self).update(known, _found=found)

    def __getattr__(self, name: str) -> Any:
        self._found.append(getattr(_here, "group", None))
        raise _EndOfCall


def _observation(found: list[Any], group: Any, place: str) -> Observation:
    is_right = bool(found) and all(each is group for each in found)
    return Observation(
        broken=not is_right,
        seen=f"{'the given' if is_right else 'no'} tensor parallel group is known in {place}",
    )


def _observe_helper(module: ModuleType) -> Observation:
    """Call the helper without a group while the thread's group is set."""
    group = object()
    found = _noted(group, module.get_tensor_model_parallel_group_if_none, None, check_initialized=False)
    return _observation([found], group, "a call with a note")


def _observe(call: Callable[[ModuleType, Any], Any], place: str) -> Callable[[ModuleType], Observation]:
    """Return an observation that calls upstream's code with an explicit group and records the thread's group inside.

    Args:
        call: gets the target module and a stub with groups that records.
        place: description of the called code.
    """

    def observe(module: ModuleType) -> Observation:
        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        groups, found = SimpleNamespace(tp=group, cp=group), list[Any]()
        config = _GroupRecorder(found, distribute_saved_activations=True, fp8=None, fp4=None)
        with contextlib.suppress(_EndOfCall):
            call(
                module,
                _GroupRecorder(found, pg_collection=groups, model_comm_pgs=groups, tp_group=group, config=config),
            )
        return _observation(found, group, place)

    return observe


def _call(function: Callable[..., Any], *given: Any) -> None:
    """Call a function with None for all other required parameters."""
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    missing = [each for each in needed[len(given) :] if each.kind is each.POSITIONAL_OR_KEYWORD]
    function(*given, *[None] * len(missing))


def _cross(module: ModuleType, asking: Any) -> None:
    constructor = module.CrossAttention.__init__
    groups = {"pg_collection", "model_comm_pgs"} & {*inspect.signature(constructor).parameters}
    constructor(object.__new__(module.CrossAttention), asking, asking, 1, **dict.fromkeys(groups, asking.pg_collection))


def _latent(module: ModuleType, asking: Any) -> None:
    _call(module.MultiLatentAttention.forward, asking)


def _llava(module: ModuleType, asking: Any) -> None:
    _call(module.LLaVAModel._process_embedding_token_parallel, asking)  # noqa: SLF001 - the replaced method


def _prediction(module: ModuleType, asking: Any) -> None:
    _call(module.MultiTokenPredictionLayer._checkpointed_forward, asking)  # noqa: SLF001 - the replaced method


def _layers(module: ModuleType, asking: Any) -> None:
    _call(module.checkpointed_forward, asking)


def _old_layers(module: ModuleType, asking: Any) -> None:
    _call(module.TransformerBlock._checkpointed_forward, asking)  # noqa: SLF001 - the replaced method


def _checkpoint(module: ModuleType, asking: Any) -> None:
    """Save with the thread's group set, and gather with it unset."""
    context = _CheckpointContext(asking)
    with _given_up(module, asking):
        with contextlib.suppress(_EndOfCall):
            _noted(asking.tp_group, module.CheckpointFunction.forward, context, None, True)
        module.CheckpointFunction.backward(context)


class _CheckpointContext:
    """Context stub that keeps the group, and records at any other attribute that upstream reads or sets."""

    def __init__(self, asking: Any) -> None:
        vars(self)["_asking"] = asking

    def __setattr__(self, name: str, value: Any) -> None:
        if name != _KEPT:
            self._asking.anything  # noqa: B018 - it records, and raises
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        return self._asking.anything


@contextlib.contextmanager
def _given_up(module: ModuleType, asking: Any) -> Iterator[None]:
    """Replace two functions of upstream for a while.

    The one that marks recomputation, since 0.16.0, records and raises, so that no mark is set. `is_graph_capturing` is added
    where `cuda_graphs` is half imported and lacks it.
    """
    ours: dict[tuple[Any, str], Any] = {}
    if (theirs := getattr(module, _SETS, None)) is not None:
        ours[module, _SETS] = answer(lambda: asking.anything, theirs)
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if graphs is not None and not hasattr(graphs, _CAPTURES):
        ours[graphs, _CAPTURES] = lambda: False
    before = {place: getattr(*place, None) for place in ours}
    for place, value in ours.items():
        setattr(*place, value)
    try:
        yield
    finally:
        for place, value in before.items():
            delattr(*place) if value is None else setattr(*place, value)


_SETS, _CAPTURES = "_set_checkpointing", "is_graph_capturing"


def _part(
    target: Target,
    probe: Callable[[SourceTree], Finding],
    seams: Mapping[str, Mapping[str, Callable[..., Any]]],
    observe: Callable[[ModuleType], Observation],
    *needed: Target,
) -> Overlay:
    return Overlay(
        id="explicit-tp-groups",
        pack=44,
        title="pass the tensor parallel group of a module to the functions that it calls",
        target=target,
        probe=probe,
        replacements={
            shape: tuple(Replacement(symbol=symbol, make=make) for symbol, make in made.items())
            for shape, made in seams.items()
        },
        unsupported={},
        witness=observe,
        self_test=observe,
        opt_in=False,
        needs_parts=tuple(each.module for each in needed),
        symptoms=(
            "results are wrong or ranks hang with several tensor parallel groups",
            "loss is wrong with a ProcessGroupCollection of one's own",
            "two models with different TP sizes in one job give wrong results",
        ),
        concerns="tensor_parallel",
        breaks="with tensor parallel groups other than the default ones cross attention, multi-latent attention and LLaVA exchange values with ranks "
        "of other groups, and so do layers that distribute the activations they save for recomputation",
        retire_when="cross attention, multi-latent attention, LLaVA, and code that distributes saved activations pass their own tensor parallel group",
        brief="work in explicit TP groups",
        until="Megatron passes these groups",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: findings 4, 6 and 7"),
        ),
        last_validated="2026-11-24, x86-64 without GPU, torch 2.11.0: megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.2 and main "
        "d98e8a64dd on four gloo ranks; 0.13.0 to 0.19.2 read",
    )


_LATENT = {"MultiLatentAttention.forward": _running}
"""Seam around the forward pass. At the code that gathers latents, `mla-rope-key-gradient` has a seam of its own."""
_SAVES = (feature.DEFAULT, feature.CHECKPOINT)
"""Parts that use the group of a saving layer: without them saving, or gathering the saved activations, ignores it."""
PARTS = (
    _part(feature.DEFAULT, feature.probe, {feature.DEFAULT_GROUP: {feature.HELPER: _helper}}, _observe_helper),
    _part(
        feature.CROSS,
        feature.probe_cross,
        {feature.PROJECTIONS: {feature.CROSS.symbol: _constructing}},
        _observe(_cross, "the constructor of a cross attention"),
        feature.DEFAULT,
    ),
    _part(
        feature.LATENT,
        feature.probe_latent,
        {
            feature.ATTENTION: {"MLASelfAttention.__init__": _constructing, **_LATENT},
            feature.LATENTS: _LATENT,
        },
        _observe(_latent, "a multi-latent attention"),
        feature.DEFAULT,
    ),
    _part(
        feature.LLAVA,
        feature.probe_llava,
        {feature.EMBEDDINGS: {feature.LLAVA.symbol: _running}},
        _observe(_llava, "the function that splits embeddings"),
        feature.DEFAULT,
    ),
    _part(
        feature.PREDICTION,
        feature.probe_prediction,
        {feature.SAVED: {feature.PREDICTION.symbol: _saving}},
        _observe(_prediction, "a prediction layer that saves its inputs"),
        *_SAVES,
    ),
    _part(
        feature.LAYERS,
        feature.probe_layers,
        {feature.STACK: {feature.LAYERS.symbol: _saving}},
        _observe(_layers, "a block that saves its inputs"),
        *_SAVES,
    ),
    _part(
        feature.OLD_LAYERS,
        feature.probe_old_layers,
        {feature.STACK: {feature.OLD_LAYERS.symbol: _saving}},
        _observe(_old_layers, "a block that saves its inputs"),
        *_SAVES,
    ),
    _part(
        feature.CHECKPOINT,
        feature.probe_checkpoint,
        {feature.PIECES: {"CheckpointFunction.forward": _cutting, "CheckpointFunction.backward": _gathering}},
        _observe(_checkpoint, "the function that gathers saved pieces"),
        feature.DEFAULT,
    ),
)
