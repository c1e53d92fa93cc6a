"""Probe for learnable attention sinks of tensor parallel ranks that are not marked as shares of one parameter.

With `softmax_type="learnable"` a rank has the sinks of its own heads. A parameter without `tensor_model_parallel` is taken for a replica,
which counts on the first rank only wherever norms are taken.

    up to 0.14.0                   no sinks: ABSENT
    0.15.0 to 0.19.2, main, dev    not marked: BROKEN

No tree has a repair; the one that is proposed marks sinks where they are made, `DotProductAttention` and `TEDotProductAttention`. The seam
marks them once their attention has made its core, unless somebody did. So whatever sets the mark in one of the three looks repaired.
Multi-latent attention makes a core of its own, which has sinks where it is Transformer Engine's; it is asked about by itself.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, https://github.com/NVIDIA/Megatron-LM/pull/7530
"""

from __future__ import annotations

import ast
import re

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

CLASSES = ("SelfAttention", "CrossAttention")
CONSTRUCTORS = tuple(f"{name}.__init__" for name in CLASSES)
BASE = "Attention.__init__"
"""The constructor of both classes' base, which makes the core."""
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.attention", symbol=CONSTRUCTORS[0])
LATENT_CLASS = "MultiLatentAttention"
LATENT_CONSTRUCTOR = f"{LATENT_CLASS}.__init__"
LATENT_TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.transformer.multi_latent_attention",
    symbol=LATENT_CONSTRUCTOR,
)
CORE = "megatron.core.transformer.dot_product_attention"
CORE_CONSTRUCTOR = "DotProductAttention.__init__"
ENGINE = "megatron.core.extensions.transformer_engine"
ENGINE_CLASS = "TEDotProductAttention"
NOT_MARKED = "not-marked"

SINKS = "softmax_offset"
_MARK = re.compile(r"\b(tensor_model_parallel|set_tensor_model_parallel_attributes)\b")
_PLACES = (
    f"{CORE}:{CORE_CONSTRUCTOR}",
    *(f"{TARGET.module}:{constructor}" for constructor in (BASE, *CONSTRUCTORS)),
    f"{ENGINE}:{ENGINE_CLASS}.__init__",
)
"""Where a repair like the one that is proposed has to be read."""
_LATENT_PLACES = (*_PLACES, f"{LATENT_TARGET.module}:{LATENT_CONSTRUCTOR}")
_ATTENTION = {
    "af97d72af8625692 e4445c2392f31826 691f0e849ac6abc7": "0.15.0 to 0.15.3",
    "0796c2d46bdfe63a a99dc479a392fabd e721e75788099086": "0.16.0 and 0.16.1",
    "21a6d5f4e9fe7a7d 13ac318d43daefe4 e721e75788099086": "0.17.0 and 0.17.1",
    "22a7aea3bdc7d774 5d3eb8cd62b5ed42 a002aaa9a6ecbc3a": "0.18.0 to 0.18.2",
    "ff673e37a432844c 5d3eb8cd62b5ed42 a002aaa9a6ecbc3a": "0.19.0 to 0.19.2",
    "574db3f36cc1df68 643bf16a4e07a52a a002aaa9a6ecbc3a": "main d98e8a64dd",
    "51b2799731f011dc a0a4005487e78f31 118deb2101a6ccbf": "dev d48bd6be0a",
}
"""What the constructors of an attention are: the one of all, and those of both kinds."""
_LATENT = {
    "8d30107de37e2d98": "0.15.0 to 0.15.3",
    "f773e4abac3e5933": "0.16.0 and 0.16.1",
    "0bd91c010ab7ef4d": "0.17.0 and 0.17.1",
    "b5e5703e861f79f3": "0.18.0 to 0.19.2 and main d98e8a64dd",
    "6c7b38d217a25f04": "dev d48bd6be0a",
}
"""Fingerprints of the constructor of multi-latent attention."""
_CORES = {"f489efef12262097", "20a7b76ee8fb75d6", "72da68aca16f10c0"}
"""What makes sinks: in 0.15, since 0.16.0, and on dev."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether sinks are taken for replicas."""
    source, core = tree.module(TARGET.module), tree.module(CORE)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    if plain_class(source, CLASSES[0]) is None:
        return absent(f"defines no {CLASSES[0]}", source)
    constructor = plain_function(source, CONSTRUCTORS[0])
    if plain_class(source, CLASSES[1]) is None or any(plain_function(source, each) is None for each in CONSTRUCTORS):
        raise unknown(source, constructor, f"{' and '.join(CLASSES)} are not both there with constructors")
    body, *around = (
        meaning(tree, each) for each in _PLACES[:4]
    )  # also of what is absent: what cannot be read may be anything
    if core is None:
        return absent(f"there is no {CORE}")
    made = plain_function(core, CORE_CONSTRUCTOR)
    if made is None or SINKS not in core.text:
        return absent("attention has no sinks", core)
    if any(_marks(tree, each) for each in _PLACES):
        return judged(tree, _REPAIRED, at(core, made, "something is marked where sinks are made"), places=_PLACES)
    read_in = _ATTENTION.get(" ".join(around))
    if read_in is None:
        raise unknown(source, constructor, f"nobody read constructors of attention as they are: {' '.join(around)}")
    if body not in _CORES:
        raise unknown(core, made, f"nobody read {CORE_CONSTRUCTOR} as it is: {body}")
    seen = f"sinks are not marked as shares of a parameter, as in {read_in}"
    return broken(NOT_MARKED, at(core, made, seen))


def probe_latent(tree: SourceTree) -> Finding:
    """Return whether sinks of multi-latent attention are taken for replicas."""
    source, core = tree.module(LATENT_TARGET.module), tree.module(CORE)
    if source is None:
        return absent(f"there is no {LATENT_TARGET.module}")
    if plain_class(source, LATENT_CLASS) is None:
        return absent(f"defines no {LATENT_CLASS}", source)
    constructor = plain_function(source, LATENT_CONSTRUCTOR)
    if constructor is None:
        raise unknown(source, None, f"{LATENT_CLASS} has no constructor")
    body = meaning(tree, _LATENT_PLACES[-1])
    made = meaning(tree, _PLACES[0])
    if core is None or SINKS not in core.text:
        return absent("attention has no sinks", core)
    if any(_marks(tree, each) for each in _LATENT_PLACES):
        return judged(
            tree,
            _REPAIRED,
            at(source, constructor, "something is marked where sinks are made"),
            places=_LATENT_PLACES,
        )
    if body not in _LATENT:
        raise unknown(source, constructor, f"nobody read {LATENT_CONSTRUCTOR} as it is: {body}")
    if made not in _CORES:
        raise unknown(core, None, f"nobody read {CORE_CONSTRUCTOR} as it is: {made}")
    seen = f"sinks of its core are not marked as shares of a parameter, as in {_LATENT[body]}"
    return broken(NOT_MARKED, at(source, constructor, seen))


def _marks(tree: SourceTree, place: str) -> bool:
    """Return whether the constructor of an attention, or the class of its core, speaks of what marks parameters."""
    module, _, symbol = place.partition(":")
    source = tree.module(module)
    if (
        source is None
        or (node := source.find(symbol if module != CORE and module != ENGINE else symbol.partition(".")[0])) is None
    ):
        return False
    return _MARK.search(ast.unparse(node)) is not None
