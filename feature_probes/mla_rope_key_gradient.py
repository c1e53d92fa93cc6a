"""Probe Megatron's MLA for rotary keys, shared by all heads, whose gradient lacks the heads of other tensor parallel ranks.

`k_pos_emb` is one vector for each token. A rank expands it over its own heads, and its gradient is theirs; the sum over ranks
is taken only where the vector was gathered from parts of the sequence. Down projections that each rank has all of need
it without sequence parallelism, too, and those of which a rank has some columns always: their gather splits.

    0.12.0 to 0.13.1        missing; down projections are cut by columns there: BROKEN, and no seam
    0.14.0 to 0.16.1        missing, down projections are called in `get_query_key_value_tensors`: BROKEN
    0.17.0 and newer        missing, `_qkv_down_projection` calls them: BROKEN. Main and dev too
    0.10.0 and 0.11.0       not read, UNRECOGNISED
    up to 0.9.0             there is no such attention: ABSENT

The seams stand behind the down projection, and what they sum goes through all of `get_query_key_value_tensors`. A sum that
upstream takes as well, in there, in a constructor, behind the keys, in the mappings or once gradients are there, would be
one too many. So all of that must be as it was read.

Source: https://github.com/NVIDIA/Megatron-LM/issues/1699, https://github.com/NVIDIA/Megatron-LM/pull/6839
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_imported, check_known, plain_subclass
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

_BASE, _CLASS, _FUSED = "MultiLatentAttention", "MLASelfAttention", "FusedMLASelfAttention"
METHOD = f"{_CLASS}.get_query_key_value_tensors"
DOWN, FUSED_DOWN = f"{_CLASS}._qkv_down_projection", f"{_FUSED}._qkv_down_projection"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_latent_attention", symbol=METHOD)
MAPPINGS = "megatron.core.tensor_parallel.mappings"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
COLUMNS_ALONE = "local-heads-of-columns"
WITHIN = "local-heads"
BEHIND = "local-heads-of-down-projection"

_COLUMNS_ALONE = {"7847b1fffd8fbf44": "0.12.0 to 0.12.3", "778d859ec60203a4": "0.13.0 and 0.13.1"}
_WITHIN = {
    "51e14b02e05d4454": "main of 2025-07-29",
    "09396731362fcfd2": "0.14.0",
    "ca27e2345961e8d6": "0.15.0 to 0.15.3",
    "03fecc927e0376a2": "main of 2025-11-18",
    "ce7c3e0c66564d82": "main of 2026-01-12",
    "17278a2d69249bce": "main of 2026-01-16",
    "df5ec5bf3e1566f9": "0.16.0 and 0.16.1",
    "d5755e1daa9cca65": "main of 2026-02-06",
    "250e978e7ec78cd1": "dev of 2026-03-06",
    "fc6be9f93bb9010e": "dev of 2026-03-11",
}
_BEHIND = {
    "d6dd18bf30977648": "0.17.0 and 0.17.1",
    "0a34f9c3ded36795": "dev of 2026-03-25",
    "141f94c3cb9d5cfa": "0.18.0 to 0.18.2",
    "558559ec52d3d36e": "dev of 2026-04-14",
    "013c26bc6e8ad8e6": "0.19.0 to 0.19.2",
    "3e0200147f207707": "dev of 2026-06-08",
    "ba3e2815b6ccb63b": "dev of 2026-06-16",
    "43b3cf6e32c2bb05": "main of 2026-08-17",
    "7015994913605612": "dev of 2026-08-19",
}
"""Fingerprints of `get_query_key_value_tensors`, by where the down projections are called, with the first tree that has each."""
METHODS = {**_COLUMNS_ALONE, **_WITHIN, **_BEHIND}

DOWN_PROJECTIONS = {
    DOWN: {"c674f23a3a2e496c"},
    FUSED_DOWN: {"b6a8a000f5356913", "25b629c052171060"},  # until 0.18.2; it knows of columns since 2026-06-25
}
CONSTRUCTORS = {
    f"{_CLASS}.__init__": {
        *("96c9685c7e94ddea", "fe6e0a638047d878", "4ca47baecdca0e0b", "a9092692b31b063f", "a4881ca3056ed1f4"),
        *("a4b117c5288ad74f", "5fd9f375d7223e86", "c466add5ce9ee74c", "da9eaeda74dee305", "bf4e1903858ce34a"),
    },
    f"{_FUSED}.__init__": {
        *("08810459d3dd9364", "96dff55932b9da0d", "3da110666ce5064a", "4062ca9f1be84a23", "6913c430195def05"),
    },
    f"{_BASE}.__init__": {
        *("d39f1ffd0f5e4000", "23cee64ffaea399e", "3ffa3f8d7110fe7d", "e7359751cdc9c24f", "70b97a475eed0dab"),
        *("8eb19ecd115019bb", "906f7e24c5b31fb3", "8a984a668bfa2a66", "6f811d3fd6856fa9", "674644c8190185a9"),
        *("0534ecc9dc10a4b1", "a3d88e5734da9978", "f6b20d4c4023591c"),
    },
}
_FORWARD = {
    f"{_BASE}.forward": {
        *("ad1acea880d25ba4", "6f48dda14fcfc1e6", "1cf99d97e075f2df", "015293e0cb25c316", "c9aa76dec1e7da3d"),
        *("9f7d0a8fa4edff0f", "680623a4b9d045dc", "e166944076073127", "791bbee2b3a64b7d", "f816b4e8df03fc9f"),
        *("464ee6fc53c9138e", "b1e0a6026b547ee5", "e6f7e0d8ebe8db27", "f0f076eead347a0c", "23fe9983cacf095d"),
        *("9734f78f06d07544", "36985fda788c1db1", "7c8d198080137807", "e679535a64da8acc"),
    },
}
"""Since 0.14.0, and of every commit of main and dev until 2026-08-22."""
_MAPPINGS = {
    "gather_from_tensor_model_parallel_region": {"f0a82b6ce7dcf68a"},
    "_GatherFromModelParallelRegion": {"fad9594f9f880153"},
    "scatter_to_sequence_parallel_region": {"737ce961f85c3469"},
    "_ScatterToSequenceParallelRegion": {"061d29b5a89b8b0d"},
    "gather_from_sequence_parallel_region": {"b66a73b77b877431"},
    "_GatherFromSequenceParallelRegion": {"f11f2183fc0c6360"},
    "_split_along_last_dim": {"2a227db111253694"},
    "_gather_along_last_dim": {"da9d2c2105ca5cce"},
    "_gather_along_first_dim": {"52d6c3d2ddbc079a"},
    "_split_along_first_dim": {"ba9cd8aa6acd79a7"},
    "_reduce_scatter_along_first_dim": {"796f77cd80d04e62"},
}
"""What gathers and splits, since 0.13.0."""
_SUMS = {"_allreduce_non_tensor_model_parallel_grads": {"c5791bc3d69fa0b4", "3313f7b4158f51a5", "79e82f26c442bba5"}}
"""What sums gradients of replicas where sequence parallelism is on, since 0.14.0."""

_GATHERS = (
    "gather_from_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
)
_COPY = "copy_to_tensor_model_parallel_region"
_PLACES = (
    f"{TARGET.module}:{METHOD}",
    f"{TARGET.module}:{DOWN}",
    f"{TARGET.module}:{FUSED_DOWN}",
    *(f"{TARGET.module}:{symbol}" for symbol in (*CONSTRUCTORS, *_FORWARD)),
    *(f"{TARGET.module}:{name}" for name in (_COPY, *_GATHERS)),
    *(f"{MAPPINGS}:{name}" for name in (_COPY, "_CopyToModelParallelRegion", *_MAPPINGS)),
    *(f"{FINALIZE}:{name}" for name in _SUMS),
)
"""Where a repair like the one that is proposed has to be read."""
_REPAIRED: Repairs = {}
"""No tree has one yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the gradient of the shared rotary keys lacks the heads of other ranks."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, _CLASS) is None:
        return absent(f"defines no {_CLASS}", source)
    cls = plain_subclass(source, _CLASS, base=_BASE)
    method = plain_function(source, METHOD)
    if method is None:
        raise unknown(source, cls, f"{_CLASS} has no {METHOD.rpartition('.')[2]}")
    if _COPY in words(source.syntax):
        seen = at(source, method, f"{_COPY} is used, which sums gradients over ranks")
        return judged(tree, _REPAIRED, seen, places=_PLACES)
    body = fingerprint(method)
    read_in = METHODS.get(body)
    if read_in is None:
        raise unknown(source, method, f"{METHOD} has an unknown body {body}")
    if body not in _COLUMNS_ALONE:
        _check_around(tree, source, body in _BEHIND)
    shape = COLUMNS_ALONE if body in _COLUMNS_ALONE else WITHIN if body in _WITHIN else BEHIND
    return broken(
        shape,
        at(source, method, "k_pos_emb is expanded over the heads of a rank, and its gradient is not summed over ranks"),
        Evidence(seen=f"as in {read_in}"),
    )


def _check_around(tree: SourceTree, source: ModuleSource, is_behind: bool) -> None:
    """Check that nothing else sums what the seams sum.

    Raises:
        SourceError: something may.
    """
    plain_subclass(source, _BASE, base="Attention")
    fused = plain_class(source, _FUSED)
    if is_behind != (fused is not None):
        raise unknown(source, fused, f"{_FUSED} and {METHOD} are of different trees")
    if fused is not None:
        plain_subclass(source, _FUSED, base=_CLASS)
        for name in (METHOD, f"{_BASE}.forward"):
            if own := source.bindings.of(f"{_FUSED}.{name.rpartition('.')[2]}"):
                raise unknown(source, own[0], f"{_FUSED} has a {name.rpartition('.')[2]} of its own")
    if own := source.bindings.of(f"{_CLASS}.forward"):
        raise unknown(source, own[0], f"{_CLASS} has a forward of its own")
    for symbol, bodies in (*DOWN_PROJECTIONS.items(), *CONSTRUCTORS.items(), *_FORWARD.items()):
        if is_behind or (symbol not in DOWN_PROJECTIONS and not symbol.startswith(_FUSED)):
            check_known(source, symbol, bodies)
    if not is_behind and (own := source.bindings.of(DOWN)):
        raise unknown(source, own[0], f"{METHOD} does not call {DOWN}")
    check_imported(source, _GATHERS, MAPPINGS)
    for module, known in ((MAPPINGS, _MAPPINGS), (FINALIZE, _SUMS)):
        other = tree.module(module)
        if other is None:
            raise unknown(source, None, f"there is no module {module}")
        for name, bodies in known.items():
            check_known(other, name, bodies)
