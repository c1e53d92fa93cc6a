"""Tensors of all queries, heads and keys that DSA's index scores, and the backward of its fused indexer loss, build.

Every release with DSA builds them, main of 2026-08-22 and dev of 2026-08-21 too. 0.16 has a method and leaves the backward to
autograd. Since 0.17 a function computes the scores, and the loss has a backward of its own that builds eleven tensors of
that size against three in the forward; since 0.19 the relu is an option.

Loss and backward build the main attention's scores, (batch, attention heads, queries, keys), as well. Where the bodies of
both, and of what they call, are known, the shape says so and both are replaced whole. Where only scores and backward are
known, the seam on the backward lets upstream's code work out the gradient of the scores and takes over where heads come
in, so it relies on the order inside. A body of these two that was not read is UNRECOGNISED. Where the loss is known, the function that chooses keys is replaced if its body is known, too,
and since 0.19 the autograd function of the loss with it; another shape says that one of them is not. No repair has been seen yet: whether code builds
such a tensor does not show in its names, and FIXED takes the fingerprints of a repair that was read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
_CLASS = "DSAIndexer"
SCORES = "_compute_index_scores"
METHOD = f"{_CLASS}.{SCORES}"
BACKWARD = "bwd_fused_indexer_loss_naive"
TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol=SCORES)

FOUR_AXIS_METHOD = "four-axis-method"
FOUR_AXIS = "four-axis-functions"
FOUR_AXIS_OPTIONAL_RELU = "four-axis-functions-optional-relu"
LOSS = "compute_dsa_indexer_loss"
TOP_K = "fused_qk_topk_naive"
FUSED_LOSS = "FusedDSAIndexerLoss"
"""The autograd function of the loss."""
SOFTENED_LOSS = "four-axis-functions-softened-loss"
EXACT_LOSS = "four-axis-functions-exact-loss"
EXACT_LOSS_EXTERNAL_MASS = "four-axis-functions-exact-loss-external-mass"
WITHOUT_LOSS = {
    SOFTENED_LOSS: FOUR_AXIS,
    EXACT_LOSS: FOUR_AXIS_OPTIONAL_RELU,
    EXACT_LOSS_EXTERNAL_MASS: FOUR_AXIS_OPTIONAL_RELU,
}
"""The shape of scores and backward alone, by that with the loss."""
OTHER_TOP_K = {shape: f"{shape}-other-top-k" for shape in WITHOUT_LOSS}
"""The shape whose choice of keys is left to upstream, by that with it."""

_Bodies = tuple[str, str | None]
"""Fingerprints of the scores and of the backward of the loss, None where it has none."""

_BROKEN: Mapping[_Bodies, tuple[str, str]] = {
    ("96cfb6ddfe0ac18b", None): (FOUR_AXIS_METHOD, "0.16.0 and 0.16.1"),
    ("ace32bfc4bd3beca", "6aa4c82a95b0ddad"): (FOUR_AXIS, "0.17.0 to 0.18.2"),
    ("ace32bfc4bd3beca", "2a450e4ff9ad1831"): (FOUR_AXIS, "dev of 2026-05-27 to 2026-07-22"),
    ("c12f370018a641b6", "ce06f43b0d246b16"): (FOUR_AXIS_OPTIONAL_RELU, "PR 3674 and main of 2026-06-25"),
    ("c12f370018a641b6", "76949155f39584c0"): (FOUR_AXIS_OPTIONAL_RELU, "0.19.0, 0.19.2 and main"),
    ("c12f370018a641b6", "6f76b6c3f70bd668"): (FOUR_AXIS_OPTIONAL_RELU, "dev"),
}
_LOSSES: Mapping[tuple[str, str], str] = {
    ("6aa4c82a95b0ddad", "251ac827e9537b38"): SOFTENED_LOSS,
    ("76949155f39584c0", "9b31db30c61841d5"): EXACT_LOSS,
    ("6f76b6c3f70bd668", "ea90d5dedcff70f5"): EXACT_LOSS_EXTERNAL_MASS,
}
"""Shapes by the fingerprints of backward and loss."""
_MASKING, _LAYOUT, _DIVERGENCES = (f"{_VARIANT}.{name}" for name in ("dsa_masking", "dsa_layout", "dsa_indexer_loss"))
_EXACT_HELPERS = {
    (_MASKING, "normalize_varlen_bounds"): "c773ba8d82528598",
    (_MASKING, "prepare_additive_mask"): "75adce0d54cde93b",
    (_MASKING, "_build_default_causal_mask"): "ffbefe26ba412ecb",
    (_MASKING, "apply_starts_ends_mask_to_scores"): "836a9655337fe983",
    (_MASKING, "build_valid_mask_from_starts_ends"): "142bd17c8e746862",
    (_MASKING, "scatter_topk_into_index_mask"): "ad733f7b78721b12",
    (_MASKING, "masked_softmax"): "2d2b619b3f7e981c",
    (_MASKING, "masked_log_softmax"): "a5273551d480e79d",
    (_MASKING, "normalize_query_valid_rows"): "595191400015f701",
    (_LAYOUT, "ensure_sbhd"): "3beb9fe5273e5bb5",
    (_DIVERGENCES, "normalize_indexer_target"): "af1911153b03e2e2",
    (_DIVERGENCES, "indexer_loss_from_target"): "9ffcf065b3c1f073",
    (_DIVERGENCES, "indexer_kl_per_row"): "55ecef4d57cbde62",
    (_DIVERGENCES, "_indexer_kl_terms"): "46ad1b6414903db3",
    (_DIVERGENCES, "reduce_indexer_kl_sum"): "bcd38923be0dc256",
}
_HELPERS: Mapping[str, Mapping[tuple[str, str], str]] = {
    SOFTENED_LOSS: {},
    EXACT_LOSS: _EXACT_HELPERS,
    EXACT_LOSS_EXTERNAL_MASS: {
        **_EXACT_HELPERS,
        (TARGET.module, "_compute_indexer_teacher_probabilities"): "94b3bf31614ef85f",
        (TARGET.module, "_normalize_indexer_teacher_target"): "ebc659e6ea69d30c",
    },
}
"""Fingerprints of what loss and backward call, by module and name."""
_TOP_K = {
    SOFTENED_LOSS: "db01faf01a0371e7",
    EXACT_LOSS: "e8a39725d77b9764",
    EXACT_LOSS_EXTERNAL_MASS: "e8a39725d77b9764",
}
"""Fingerprints of what chooses keys; all that it calls is among `_HELPERS` or is the scores."""
_FUSED = {EXACT_LOSS: ("7e24510c970e55c6", "ede3ee50592d23d5")}
"""Fingerprints of the autograd function of a loss, and of what its forward pass calls, where seams rely on them."""
_FUSED_FORWARD = "fwd_fused_indexer_loss_naive"
_REPAIRED: Repairs = {}
"""No repair was read yet."""

_PRODUCTS = "sbhd,tbd->sbht"
_EQUATIONS = [_PRODUCTS, "sbht,sbhd->tbd", "sbht,tbd->sbhd"]
"""What the backward asks of `einsum`, in alphabetical order: the products again, the gradients of k and of q."""
_INPUTS = ("q", "weights", "k")

_KERNELS = f"{_VARIANT}.dsa_kernels"
_BACKENDS = "_BACKEND_MODULE_NAME_BY_BACKEND"
_COMPRESSED = f"{_VARIANT}.csa_utils.cp_utils"
_COPY = "compute_cp_indexer_topk"


def probe(tree: SourceTree) -> Finding:
    """Return whether index scores, or their gradients, go through a tensor of (queries, batch, heads, keys)."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    scores, backward = plain_function(source, SCORES), plain_function(source, BACKWARD)
    if scores is None:
        scores = plain_function(source, METHOD)
    elif source.find(METHOD) is not None:
        raise unknown(source, scores, f"has both {SCORES} and {METHOD}")
    if scores is None:
        return _without_scores(source, backward)
    bodies = fingerprint(scores), None if backward is None else fingerprint(backward)
    if bodies not in _BROKEN and not any(
        call for each in (scores, backward) if each is not None for call in _products(each)
    ):
        nothing = at(source, scores, "asks einsum for no tensor of queries, heads and keys")
        places = [f"{TARGET.module}:{name}" for name in (SCORES, METHOD, BACKWARD)]
        return judged(tree, _REPAIRED, nothing, places=places)
    if bodies not in _BROKEN:
        raise unknown(source, scores, f"{SCORES} and {BACKWARD} have unknown bodies, {bodies[0]} and {bodies[1]}")
    for problem in _surprises(scores, backward) if backward is not None else ():
        raise unknown(source, backward, f"{BACKWARD} {problem}")
    shape, where = _BROKEN[bodies]
    seen = [
        at(source, call, f"{function.name} builds [queries, batch, heads, keys] in float32")
        for function in (scores, backward)
        if function is not None
        for call in _products(function)
    ]
    with_loss, said = _with_loss(tree, source, bodies[1])
    return broken(
        with_loss or shape, *seen, Evidence(seen=f"as in {where}"), *said, *_backends(tree), *_compressed(tree)
    )


def _with_loss(tree: SourceTree, source: ModuleSource, backward: str | None) -> tuple[str | None, list[Evidence]]:
    """Return the shape whose loss is replaced, too, None where one of the bodies was not read, and what was seen."""
    loss = plain_function(source, LOSS)
    if loss is None or backward is None or backward not in {known for known, _ in _LOSSES}:
        return None, []
    shape = _LOSSES.get((backward, fingerprint(loss)))
    if shape is None:
        return None, [at(source, loss, f"{LOSS} has an unknown body, {fingerprint(loss)}: {_LEFT}")]
    for (name, function), known in _HELPERS[shape].items():
        module = tree.module(name)
        found = None if module is None else plain_function(module, function)
        if found is None or fingerprint(found) != known:
            return None, [at(source, loss, f"{name}.{function}, which it calls, is not known: {_LEFT}")]
    seen = [at(source, loss, f"{LOSS} builds [batch, attention heads, queries, keys] in float32")]
    if (other := _other_top_k(source, _TOP_K[shape]) or _other_function(source, shape)) is not None:
        return OTHER_TOP_K[shape], [*seen, other]
    return shape, seen


def _other_top_k(source: ModuleSource, known: str) -> Evidence | None:
    """Return what is not known of the function that chooses keys, if so; it is no reason to leave the rest."""
    left = "which keys are chosen is left to upstream"
    try:
        found = plain_function(source, TOP_K)
    except SourceError as error:
        return Evidence(seen=f"{error}: {left}", file=source.path)
    if found is None:
        return Evidence(seen=f"there is no {TOP_K}: {left}", file=source.path)
    if fingerprint(found) != known:
        return at(source, found, f"{TOP_K} has an unknown body, {fingerprint(found)}: {left}")
    return None


def _other_function(source: ModuleSource, shape: str) -> Evidence | None:
    """Return what is not known of the autograd function of the loss, if seams rely on it."""
    if shape not in _FUSED:
        return None
    left = "keys are chosen, and a sparse loss is computed, as upstream has it"
    try:
        found = plain_class(source, FUSED_LOSS), plain_function(source, _FUSED_FORWARD)
    except SourceError as error:
        return Evidence(seen=f"{error}: {left}", file=source.path)
    for each in (f"{FUSED_LOSS}.forward", f"{FUSED_LOSS}.backward"):
        if len(source.bindings.of(each)) > 1:
            return Evidence(seen=f"{each} is set from outside its class: {left}", file=source.path)
    for name, body, known in zip((FUSED_LOSS, _FUSED_FORWARD), found, _FUSED[shape], strict=True):
        if body is None:
            return Evidence(seen=f"there is no {name}: {left}", file=source.path)
        if fingerprint(body) != known:
            return at(source, body, f"{name} has an unknown body, {fingerprint(body)}: {left}")
    return None


_LEFT = "the main attention's scores, (batch, attention heads, queries, keys), stay as they are"


def _without_scores(source: ModuleSource, backward: FunctionNode | None) -> Finding:
    """Return ABSENT only where no DSA is: what moved or got another name is not gone."""
    if (rest := backward or source.find(_CLASS) or next(_products(source.syntax), None)) is None:
        return absent(f"{source.name} has no {SCORES}")
    raise unknown(source, rest, f"there is DSA but no {SCORES}")


def _products(node: ast.AST) -> Iterator[ast.Call]:
    return (call for call in calls(node, "einsum") if _equation(call) == _PRODUCTS)


def _equation(call: ast.Call) -> str:
    match call.args:
        case [ast.Constant(value=str(equation)), *_]:
            return equation
    return ""


def _surprises(scores: FunctionNode, backward: FunctionNode) -> Iterator[str]:
    """Yield where a backward is not what the seam takes it for: a guard for whoever adds a fingerprint."""
    optional = "use_relu" in parameters(scores)
    asked = f"{SCORES}(q, weights, k{', use_relu=use_relu' if optional else ''})"
    inner = calls(backward, SCORES)
    if parameters(backward)[:3] != _INPUTS or ("use_relu" in parameters(backward)) is not optional:
        yield f"does not take {', '.join(_INPUTS)} first, or use_relu as the scores do"
    elif [ast.unparse(call) for call in inner] != [asked]:
        yield f"does not compute the scores once, by {asked}"
    elif sorted(_equation(call) for call in calls(backward, "einsum")) != _EQUATIONS:
        yield "contracts something else than products and gradients"
    else:
        start = next(_products(backward)).lineno
        yield from (f"uses {name} before heads come in" for name in _early(backward, start, inner[0]))
        if _products_behind(backward, start) not in _MULTIPLIED:
            yield "does not multiply one gradient with products and with weights"
        if [ast.unparse(each) for each in _returned(backward)] != [f"grad_{name}.to({name}.dtype)" for name in _INPUTS]:
            yield "returns something else than the gradients of q, weights and k"


def _early(backward: FunctionNode, start: int, inner: ast.Call) -> Iterator[str]:
    """Yield the inputs that a backward binds anew, or reads before a line other than for the scores or a device."""
    harmless = {id(node) for node in ast.walk(inner)}
    harmless |= {
        id(each.value) for each in ast.walk(backward) if isinstance(each, ast.Attribute) and each.attr == "device"
    }
    for node in ast.walk(backward):
        if isinstance(node, ast.Name) and node.id in _INPUTS:
            read = isinstance(node.ctx, ast.Load)
            if not read or (node.lineno < start and id(node) not in harmless):
                yield node.id


_GRADIENT = "grad_weighted_scores"
_MULTIPLIED = tuple(
    sorted(
        [
            (_GRADIENT, products),
            (_GRADIENT, "weights.unsqueeze(-1)"),
            (on_its_way, "relu_mask.float()"),
        ]
    )
    for products, on_its_way in (("scores_after_relu", "grad_scores_after_relu"), ("scores_for_weights", "grad_scores"))
)
"""What a backward multiplies once heads are in, up to 0.18 and since."""


def _products_behind(backward: FunctionNode, start: int) -> list[tuple[str, str]]:
    found = [each for each in ast.walk(backward) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult)]
    return sorted((ast.unparse(each.left), ast.unparse(each.right)) for each in found if each.lineno > start)


def _returned(backward: FunctionNode) -> list[ast.expr]:
    match [each for each in ast.walk(backward) if isinstance(each, ast.Return)]:
        case [ast.Return(value=ast.Tuple(elts=found))]:
            return found
    return []


def _backends(tree: SourceTree) -> Iterator[Evidence]:
    """Yield how a configuration goes past the function, if the tree has backends that do.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5049 and https://github.com/NVIDIA/Megatron-LM/pull/5099
    """
    if (source := tree.module(_KERNELS)) is None:
        return
    for node in source.syntax.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=table)], value=ast.Dict(keys=names, values=modules)) if (
                table == _BACKENDS
            ):
                listed = zip(map(_text, names), map(_text, modules), strict=True)
                here = [name for name, module in listed if tree.module(module) is not None]
                if here:
                    yield at(source, node, _BYPASS.format(" or ".join(here)))
                return
    yield Evidence(
        seen="its backends are not listed in a way that is known; some may never call this", file=source.path
    )


_BYPASS = (
    "where dsa_kernel_backend is {} and attention_backend is not unfused, fused kernels may run instead, and then what is "
    "replaced is not called; it is where they decline or are not asked, as tilelang is not for a dense indexer loss"
)


def _compressed(tree: SourceTree) -> Iterator[Evidence]:
    """Yield the copy that compressed sparse attention has for context parallelism, which nobody repairs."""
    if (source := tree.module(_COMPRESSED)) is not None and (found := source.find(_COPY)) is not None:
        yield at(
            source, found, f"with context parallelism, compressed sparse attention has its own in {_COPY}: not repaired"
        )


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "?"
