"""With which standard deviation experts of Megatron's latent MoE begin, whose second projection does not end in the residual.

Experts of a latent MoE read a latent of the hidden state and write one, and a projection of the layer takes it to the residual. Both that
and the experts' second projection begin with the method for output layers, whose deviation is divided by the root of twice
the number of layers.

    up to 0.15.3            no latent MoE: ABSENT
    0.16.0 and 0.16.1       by specifications: BROKEN, and no seam
    0.17.0 to 0.19.2, main, dev   by builders: BROKEN

No tree has a repair. A constructor that chooses between two methods looks repaired.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6278, https://github.com/NVIDIA/Megatron-LM/issues/5225
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import calls, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

SINGLE, GROUPED = (
    Target(distribution="megatron-core", module=f"megatron.core.transformer.{module}", symbol=f"{name}.__init__")
    for module, name in (("mlp", "MLP"), ("moe.experts", "TEGroupedMLP"))
)
SCALED = "scaled-twice"
SCALED_BY_SPECIFICATION = "scaled-twice-by-specification"

_LATENT = "moe_latent_size"
_METHODS = {"init_method", "output_layer_init_method"}
_KNOWN = {
    "fc584b0fb2726937": "0.17.0 and 0.17.1",
    "9e4f5dee2b7b9a20": "0.18.0 to 0.18.2 and dev d48bd6be0a",
    "8c08fc6450f9dcc7": "0.19.0 to 0.19.2",
    "ac8bb71e9735cc50": "main d98e8a64dd",
    "1edf9d4e4aa6e472": "0.17.0 and 0.17.1",
    "0be273983d4fd2ec": "0.18.0 to 0.18.2",
    "83d2fe940af60791": "0.19.0 to 0.19.2",
    "262de31ef5c60182": "main d98e8a64dd",
    "9f412a2cb17192e2": "dev d48bd6be0a",
}
"""What the constructors are: four of single experts, and five of grouped ones."""
_SPECIFIED = {"d22dc01b099eed2d": "0.16.0 and 0.16.1", "fa98cd5e40c30d5b": "0.16.0 and 0.16.1"}
"""What the constructors were while `build_module` made what a specification says."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe_single(tree: SourceTree) -> Finding:
    """Return how an expert that is a module of its own begins."""
    return _probe(tree, SINGLE)


def probe_grouped(tree: SourceTree) -> Finding:
    """Return how experts begin that Transformer Engine computes together."""
    return _probe(tree, GROUPED)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no {target.module}")
    seen = "experts of a latent MoE begin with the method for output layers"
    constructor = source.function(target.symbol)
    body = meaning(tree, f"{target.module}:{target.symbol}")  # what cannot be read may be anything, and is not absent
    if constructor is None or _LATENT not in source.text:
        return absent("experts read and write hidden states alone", source)
    for shape, known in ((SCALED, _KNOWN), (SCALED_BY_SPECIFICATION, _SPECIFIED)):
        if (read_in := known.get(body)) is not None:
            return broken(shape, at(source, constructor, f"{seen}, as in {read_in}"))
    if any(words(each) >= _METHODS for each in calls(constructor, "linear_fc2")):
        seen = f"{target.symbol} chooses how linear_fc2 begins"
        return judged(tree, _REPAIRED, at(source, constructor, seen), places=(f"{target.module}:{target.symbol}",))
    raise unknown(source, constructor, f"nobody read {target.symbol} as it is: {body}")
