"""Configuration of the model that this process trains, found from its objects without arguments.

Objects are found in one walk over the heap. With several models, or changed copies of an object, all of their values are possible.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence

from megacpp_overlays.concerns.configuration import UNKNOWN, Configuration, Values, Vocabulary, possible
from megacpp_overlays.concerns.features import FEATURES

_CONFIGS = {
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "OptimizerConfig": "megatron.core.optimizer.optimizer_config",
    "DistributedDataParallelConfig": "megatron.core.distributed.distributed_data_parallel_config",
}
"""Configuration classes, each with its module."""
_OF_MODULES = frozenset(name for feature in FEATURES for name in feature.classes)
_SIZES = {
    "tensor_model_parallel_size": "get_tensor_model_parallel_world_size",
    "context_parallel_size": "get_context_parallel_world_size",
}
"""Sizes, each with the function of `parallel_state` that returns it for this process."""
_MISSING = object()
_KEYS = frozenset(sign.key for feature in FEATURES for sign in (*feature.config, *feature.shows))


def of_this_process() -> Configuration | None:
    """Return the configuration of the model of this process; None where Megatron configures none."""
    bases = {name: base for name, module in _CONFIGS.items() if (base := _loaded(module, name)) is not None}
    if "TransformerConfig" not in bases:
        return None
    found = _objects(bases)
    models = found["TransformerConfig"]
    if not models:
        return None
    values = possible(*(_fields(each) for objects in found.values() for each in objects))
    return Configuration(
        origin=" and ".join(sorted({type(each).__name__ for each in models})) + " of this process",
        vocabulary=Vocabulary.CONFIG,
        values={**values, **_sizes_of_groups(values)},
        whole=frozenset(name for name, objects in found.items() if objects),
        decided=_by_class(found[""], is_all=_is_all_here(models)),
    )


def _loaded(module: str, name: str) -> type | None:
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, type) else None


def _objects(bases: dict[str, type]) -> dict[str, list[object]]:
    """Return objects of configuration classes by their class, and one module of each class that is a feature under the empty name."""
    kinds = {kind: name for name, base in bases.items() for kind in _with_subclasses(base)}
    found: dict[str, list[object]] = {**{name: [] for name in bases}, "": []}
    seen: set[type] = set()
    everything: list[object] = gc.get_objects()
    for each in everything:
        kind = type(each)
        if kind in kinds:
            found[kinds[kind]].append(each)
        elif kind not in seen:
            seen.add(kind)
            if _names(kind) & _OF_MODULES:
                found[""].append(each)
    return found


def _with_subclasses(base: type) -> Iterator[type]:
    yield base
    below: list[type] = type.__subclasses__(base)
    for each in below:
        yield from _with_subclasses(each)


def _names(kind: type) -> frozenset[str]:
    return frozenset(each.__name__ for each in type.mro(kind)) if kind is not type else frozenset()


def _fields(config: object) -> Values:
    """Return the fields of an object that features ask for; one that raises is not known."""
    return {key: (value,) for key in _KEYS if (value := _field(config, key)) is not _MISSING}


def _field(config: object, key: str) -> object:
    try:
        return getattr(config, key, _MISSING)
    except Exception:  # noqa: BLE001 - a third-party object
        return UNKNOWN


def _sizes_of_groups(values: Values) -> Values:
    """Return the configured sizes together with those of Megatron's process groups."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return {}
    try:
        sizes = [getattr(state, name)() for name in _SIZES.values()] if state.model_parallel_is_initialized() else []
    except Exception:  # noqa: BLE001 - a state by halves says nothing
        sizes = [UNKNOWN] * len(_SIZES)
    of_groups: Values = {key: (size,) for key, size in zip(_SIZES, sizes, strict=False)}
    return possible({key: values[key] for key in of_groups if key in values}, of_groups)


def _is_all_here(models: Sequence[object]) -> bool:
    """Return whether this process has all layers of its model: no stage of a pipeline is elsewhere."""
    return all(getattr(each, "pipeline_model_parallel_size", None) == 1 for each in models)


def _by_class(modules: Sequence[object], *, is_all: bool) -> dict[str, bool]:
    names = frozenset[str]().union(*(_names(type(each)) for each in modules))
    found: dict[str, bool] = {}
    for feature in FEATURES:
        if names & {*feature.classes}:
            found[feature.name] = True
        elif feature.by_class and is_all:
            found[feature.name] = False
    return found
