"""Summation of gradients of norms over tensor parallel ranks, only where each rank has a partial gradient.

Norms are replicated. Without sequence parallelism a rank has the whole gradient of a norm, unless the norm feeds only the rank's own
heads. Upstream distinguishes the two cases by name: `q_layernorm` and `k_layernorm` are summed.

Multi-latent attention has a `q_layernorm` of the latent queries, which are the same on each rank, and whose gradient the up projection
has summed. Summed again, the gradient is too large by a factor of the number of ranks. The `out_norm` of a gated delta net norms heads,
and is not summed: each rank learns from its own heads, and replicas drift apart.

Upstream's function runs unchanged. It gets the same parameters under names by which it sums the right ones. The classes of the modules
that hold the parameters, and the methods that use them, decide the names. With sequence parallelism latent queries are parts of the
sequence, and nothing differs from upstream. Upstream's averages, and its sums by an attribute, do not depend on names.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import tp_norm_gradients as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer
from megacpp_overlays.runtime.overrides import reaches

NET = "megatron.core.ssm.gated_delta_net"
NETS = {f"{NET}.common": "_GDNBase", NET: "GatedDeltaNet"}
"""Modules with the class that makes and uses the output norm: since 0.19.0, and up to 0.18.2."""
QUERIES, QUERY_NORM, OUTPUT_NORM = "get_query_key_value_tensors", "q_layernorm", "out_norm"
GATED_NORM = "_apply_gated_norm"
NAMES = (QUERY_NORM, "k_layernorm")
"""Names of norms that upstream sums."""

_SUMMED, _NOT_SUMMED = NAMES[0], ""
"""Names by which upstream chooses."""


def _make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _allreduce_non_tensor_model_parallel_grads(model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        return original([_RenamedChunk(chunk, config, module) for chunk in model], _ByName(config), *args, **kwargs)

    return _allreduce_non_tensor_model_parallel_grads


def _make_old(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _allreduce_layernorm_grads(model: Any, config: Any) -> Any:
        return original([_RenamedChunk(chunk, config, module) for chunk in model], config)

    return _allreduce_layernorm_grads


class _RenamedChunk:
    """Proxy for a chunk of a model that renames parameters, so that upstream sums the right ones."""

    def __init__(self, chunk: Any, config: Any, module: ModuleType) -> None:
        self._chunk, self._config, self._module = chunk, config, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of the chunk, each under a name that upstream sums or one that it does not."""
        asked: Callable[[Any, str], Any] = self._module.get_attr_wrapped_model
        whole, parts = _gradients(asked(self._chunk, "modules")())
        for name, parameter in asked(self._chunk, "named_parameters")():
            is_named = self._config.qk_layernorm and any(each in name for each in NAMES)
            is_summed = id(parameter) in parts or (is_named and id(parameter) not in whole)
            yield (_SUMMED if is_summed else _NOT_SUMMED), parameter


class _ByName:
    """Proxy for a configuration that enables sums by name, the only use of `qk_layernorm` by upstream since 0.13.0."""

    qk_layernorm = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _gradients(modules: Any) -> tuple[set[int], set[int]]:
    """Return the ids of norm parameters with a whole gradient on each rank, and of those with a partial one."""
    whole, parts = set[int](), set[int]()
    for each in modules:
        if _is(each, {feature.ATTENTION: feature.ATTENTION_CLASS}, QUERIES):
            if not each.config.sequence_parallel:
                whole |= _parameters(each, QUERY_NORM)
        elif _is(each, NETS, GATED_NORM) and each.tp_size > 1:
            parts |= _parameters(each, OUTPUT_NORM)
    return whole, parts


def _is(each: Any, classes: dict[str, str], method: str) -> bool:
    """Return whether a module runs the method of one of these classes, also through overrides that call it.

    Classes are given as defining module and name, because the class may not be imported yet.
    """
    return reaches(type(each), method, lambda owner, _: classes.get(owner.__module__) == owner.__qualname__)


def _parameters(holder: Any, name: str) -> set[int]:
    norm = getattr(holder, name, None)
    return set() if norm is None else {id(each) for each in norm.parameters()}


class _AboutToSum(Exception):  # noqa: N818 - it is no error
    """Signal that upstream is about to flatten the gradients that it sums."""


def observe(module: ModuleType) -> Observation:
    """Observe which gradients of norms two ranks would sum: of latent queries, of queries of heads, and of outputs of a delta net.

    There is no communication. Stub classes have the names of upstream's, which may not be imported yet.
    """
    is_old = not hasattr(module, feature.FUNCTION)
    layers = {
        "latent queries": (feature.ATTENTION, feature.ATTENTION_CLASS, QUERIES, QUERY_NORM),
        "queries of heads": ("any", "SelfAttention", QUERIES, QUERY_NORM),
        "outputs": (NET, NETS[NET], GATED_NORM, OUTPUT_NORM),
    }
    right = {"latent queries": False, "queries of heads": True, "outputs": True}
    if is_old:
        del right["outputs"]  # there are no such layers
    found = {name: _is_summed(module, _layer(*layers[name]), is_old) for name in right}
    seen = ", ".join(f"those of {name} are {'' if is_summed else 'not '}summed" for name, is_summed in found.items())
    return Observation(broken=found != right, seen=f"of gradients of norms, {seen}")


def _layer(found_in: str, name: str, method: str, norm: str) -> Any:
    """Return a layer of a stub class with this module and name, with a norm that has a gradient."""
    import torch

    kind = type(name, (torch.nn.Module,), {"__module__": found_in, method: lambda _: None})
    made, held = kind(), torch.nn.Module()
    weight = torch.nn.Parameter(torch.ones(1, device="cpu"))
    weight.grad = torch.ones(1, device="cpu")
    held.register_parameter("weight", weight)
    made.add_module(norm, held)
    made.tp_size, made.ddp_config = 2, SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)
    made.config = SimpleNamespace(sequence_parallel=False, qk_layernorm=norm == QUERY_NORM)
    return made


def _is_summed(module: Any, layer: Any, is_old: bool) -> bool:
    """Return whether upstream is about to sum the gradient of a layer's norm over two tensor parallel ranks."""

    def about_to_sum(*_: Any) -> Any:
        raise _AboutToSum

    group = SimpleNamespace(size=lambda: 2)
    ours: dict[str, Any] = {"_flatten_dense_tensors": answer(about_to_sum, vars(module)["_flatten_dense_tensors"])}
    state = module.parallel_state
    ranks = state.get_tensor_model_parallel_world_size
    ours["parallel_state"] = Instead(state, get_tensor_model_parallel_world_size=answer(lambda: 2, ranks))
    if (asked := getattr(module, _GROUP, None)) is not None:
        ours[_GROUP] = answer(lambda *_: group, asked)
    theirs = {name: getattr(module, name) for name in ours}
    vars(module).update(ours)
    try:
        getattr(module, feature.OLD_FUNCTION if is_old else feature.FUNCTION)([layer], layer.config)
    except _AboutToSum:
        return True
    finally:
        vars(module).update(theirs)
    return False


_GROUP = "get_tensor_model_parallel_group_if_none"
"""Function from which upstream gets the group since 0.14.0."""
_SEAMS = {feature.BY_NAME: (feature.FUNCTION, _make), feature.OLD_BY_NAME: (feature.OLD_FUNCTION, _make_old)}

OVERLAY = Overlay(
    id="tp-norm-gradients",
    pack=42,
    title="sum gradients of norms over tensor parallel ranks where each has a part of them",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={shape: (Replacement(symbol=symbol, make=make),) for shape, (symbol, make) in _SEAMS.items()},
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "grad_norm changes with the TP size without sequence parallelism",
        "replicas drift apart under tensor parallelism with gated delta nets",
        "q_layernorm has a gradient that is too large",
    ),
    concerns="tensor_parallel and not sequence_parallel and (mla or gated_delta)",
    breaks="without sequence parallelism MLA's q_layernorm has a gradient as many times too large as there are tensor parallel ranks, and "
    "replicas of a gated delta net's out_norm drift apart",
    retire_when="_allreduce_non_tensor_model_parallel_grads sums gradients of out_norm, and those of q_layernorm of norms of heads alone",
    brief="gradients of norms under TP",
    until="Megatron sums parts of gradients",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=7452, state="open, opened 2026-09-17: finding 11, of out_norm"),
    ),
    last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.2, main "
    "d98e8a64dd and dev d48bd6be0a on two gloo ranks, 0.19.2 on four; 0.12.0 to 0.19.2 read",
)
