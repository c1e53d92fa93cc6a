"""The fused linear cross entropy of liger-kernel, and the upstream gradient by which it scales that of each token.

With `reduction="none"` the backward pass receives one gradient per token. Until 0.8.1 it hands the tensor to a
kernel that reads only its first element, and multiplies every gradient by that. From 0.8.2 on the gradients are
computed in the backward pass, with `token_grad_output`.

What was seen in the releases:

    0.1.0 to 0.2.1                  no `reduction`
    0.3.0 to 0.5.2, 0.5.9 to 0.6.2  "none" returns the sum of the losses, one number
    0.5.3 to 0.5.8, 0.6.3 to 0.8.1  per-token losses, gradients scaled by the first element
    0.8.2 to 0.8.5                  per-token losses, per-token gradients

The seam differentiates what the forward pass computes, so a release is only called repairable when every part
that defines the loss is one that was read: the module without comments, docstrings and layout, and the kernel with
the imports and constants beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from megacpp_overlays.feature_probes.definitions import binders, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, conclusion, unknown, unrecognised
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Body, Evidence, Finding, Verdict
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.patterns import Match, Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
FUNCTION = "LigerFusedLinearCrossEntropyFunction"
CORE_FORWARD = "fused_linear_cross_entropy_forward"
CORE_BACKWARD = "fused_linear_cross_entropy_backward"
KERNEL_MODULE = "liger_kernel.ops.cross_entropy"
KERNEL = "liger_cross_entropy_kernel"

DETACHED = "per-token-scalar-backward"
"""The forward pass works on an input without gradient, and then computes none (or no more than the input's)."""
BIAS_NEEDS_GRADIENT = "per-token-scalar-backward-input-grad-with-bias"
"""The forward pass fails when there is a bias and the input has no gradient."""
INPUT_NEEDS_GRADIENT = "per-token-scalar-backward-input-grad"
"""The forward pass fails when the input has no gradient."""
SCALAR_NONE = "scalar-none"
"""`reduction="none"` returns one number."""
REJECTED = "per-token-rejected"
"""The backward pass asserts that the upstream gradient is one number."""


class KnownRelease(NamedTuple):
    """Releases whose parts are the same, and the shape they have. Parts are fingerprints, see `fingerprints`."""

    releases: str
    shape: str
    parts: Mapping[str, str]


_PARTS = (CORE_FORWARD, CORE_BACKWARD, FUNCTION, KERNEL, "the rest")


def _known(releases: str, shape: str, parts: str) -> KnownRelease:
    return KnownRelease(releases, shape, dict(zip(_PARTS, parts.split(), strict=True)))


KNOWN = (
    _known(
        "0.5.3 to 0.5.5",
        DETACHED,
        "202a77230d6848ca 1287d9753299dc74 71e4dbbb5c2955c5 91ab6fcef0f329bc d24c1667542ffe60",
    ),
    _known(
        "0.5.6 to 0.5.8",
        DETACHED,
        "202a77230d6848ca 1287d9753299dc74 71e4dbbb5c2955c5 576c12850df29c94 d24c1667542ffe60",
    ),
    _known(
        "0.6.3",
        INPUT_NEEDS_GRADIENT,
        "ca1ec270fdb96b18 1287d9753299dc74 e87da7d90ec6356c c3ae95024bca70d5 d24c1667542ffe60",
    ),
    _known(
        "0.6.4",
        BIAS_NEEDS_GRADIENT,
        "b5526b06177ee647 1287d9753299dc74 fb3e28f7c4facab2 0521a7dc7238e979 d24c1667542ffe60",
    ),
    _known(
        "0.6.5 and 0.7.0",
        BIAS_NEEDS_GRADIENT,
        "b5526b06177ee647 1287d9753299dc74 fb3e28f7c4facab2 b8a5e10d1eda0455 6a4501d807cf3507",
    ),
    _known("0.8.0", DETACHED, "aafd981bbe3b5807 1287d9753299dc74 aac67427a9ed02f0 5b30e7931b3698fe 6a4501d807cf3507"),
    _known("0.8.1", DETACHED, "5af575ba2dfb0eac 1287d9753299dc74 aac67427a9ed02f0 213d41ef2f41f5c7 9af9e61faea51d8d"),
)

_REPAIRED = table(
    (
        f"{MODULE}:",
        f"{KERNEL_MODULE}:",
        "liger_kernel.ops.utils:",
        "liger_kernel.backends.dispatch:",
        "liger_kernel.ops.backends._triton.cross_entropy:",
        "liger_kernel.ops.backends._cutedsl.cross_entropy:",
    ),
    {
        "0.8.2": "d437a9520b191c9b f02269b62dd47c6e 401dc67e642e7bab - - -",
        "0.8.3": "2743673f44089103 f02269b62dd47c6e bd5eb2e8eda60276 98dc1aed5f88f5e8 8de4babb4c9e60af 82d1f2f5fde01712",
        "0.8.4": "2743673f44089103 8df63e33821da1de bd5eb2e8eda60276 98dc1aed5f88f5e8 8de4babb4c9e60af 82d1f2f5fde01712",
        "0.8.5": "4d7c98c0375b18a3 8df63e33821da1de fa47e3e8f290202c 98dc1aed5f88f5e8 8de4babb4c9e60af 82d1f2f5fde01712",
    },
)
"""The module, and what computes the gradient that it scales: since 0.8.3 that goes through a dispatcher."""
_TEXTS = {
    "6facea7bf23363f1": "d437a9520b191c9b",
    "d6b7e171c1f3982c": "2743673f44089103",
    "70609e37dc7f966f": "4d7c98c0375b18a3",
    "2eaf8549f6dcb358": "f02269b62dd47c6e",
    "961f41ca7c06dab4": "8df63e33821da1de",
    "163eee954cbfa89e": "401dc67e642e7bab",
    "9c566fbe7444d434": "bd5eb2e8eda60276",
    "b32e7097ca832549": "fa47e3e8f290202c",
    "be88760901e7e709": "98dc1aed5f88f5e8",
    "665cff65a275a289": "8de4babb4c9e60af",
    "2ec9e8cd45f1922e": "82d1f2f5fde01712",
}
"""The same by the text of these modules, in the order of the places."""
_BODIES = (
    Body(MODULE, FUNCTION),
    Body(MODULE, CORE_FORWARD),
    Body(MODULE, CORE_BACKWARD),
    Body(MODULE, KERNEL),
    Body(KERNEL_MODULE, KERNEL),
    Body(MODULE, "element_mul_kernel"),
    Body("liger_kernel.ops.utils", "element_mul_kernel"),
)
_SCALED_BY_ONE = Pattern("element_mul_kernel[$grid]($$_, grad_output, $$_)")
_PER_TOKEN = Pattern("""
if reduction == 'none':
    $$_
    loss = loss_1d
    $$_
else:
    $$_
""")
_SUMMED = Pattern("loss = torch.sum(loss_1d)")
_CORE_CALLED = Pattern(f"{CORE_FORWARD}($$given)")
_PRODUCT = Pattern("$left * $right")


def probe(tree: SourceTree) -> Finding:
    """Return whether per-token gradients are right in the liger-kernel of a tree."""
    source = tree.module(MODULE)
    if source is None:
        return absent(f"there is no {MODULE}")
    forward, backward = source.function(f"{FUNCTION}.forward"), source.function(f"{FUNCTION}.backward")
    if forward is None or backward is None:
        raise unknown(source, None, f"{FUNCTION} has no forward or no backward")
    if "reduction" not in words(source.syntax):
        return conclusion(Verdict.ABSENT, None, at(source, forward, "there is no choice of reduction"))
    core_forward, core_backward = source.function(CORE_FORWARD), source.function(CORE_BACKWARD)
    if core_forward is None or core_backward is None:
        raise unknown(source, forward, f"{CORE_FORWARD} or {CORE_BACKWARD} is missing")
    if "token_grad_output" in parameters(core_forward):
        return _deferred(tree, source, core_forward, backward)
    if (guard := _rejection(backward) or _rejection(core_backward)) is not None:
        return broken(REJECTED, at(source, guard, "the backward pass refuses an upstream gradient per token"))
    if (scaling := _first(_SCALED_BY_ONE, core_backward)) is None:
        raise unknown(source, core_backward, f"{CORE_BACKWARD} does not scale its gradients as known")
    one_scale = at(source, scaling, "every gradient is scaled by the one number at grad_output")
    if (branch := _first(_PER_TOKEN, core_forward)) is not None:
        return _as_released(source, tree, at(source, branch, 'reduction="none" returns a loss per token'), one_scale)
    if (total := _first(_SUMMED, core_forward)) is not None and len(binders(core_forward, "loss")) == 1:
        return broken(SCALAR_NONE, at(source, total, 'reduction="none" returns the sum of the losses'), one_scale)
    raise unknown(source, core_forward, 'what reduction="none" returns is not clear')


def fingerprints(source: ModuleSource, tree: SourceTree) -> dict[str, str]:
    """Return a short hash of each part that defines the loss and its gradients.

    Comments, docstrings and layout do not count. `the rest` is everything in the module beside the parts that have
    a name here: its imports and constants, and whatever else somebody put there.

    Raises:
        SourceError: a name is defined more than once.
    """
    named = {name: source.find(name) for name in (CORE_FORWARD, CORE_BACKWARD, FUNCTION)}
    own = list(named.values())
    rest = [node for node in source.syntax.body if node not in own and not is_docstring(node)]
    return {
        **{name: fingerprint(node) for name, node in named.items()},
        KERNEL: fingerprint(_kernel(tree)),
        "the rest": fingerprint(rest),
    }


def _kernel(tree: SourceTree) -> list[object]:
    """Return the kernel, the imports and constants that it reads, and the names of the other functions there.

    Their names, because one of them could take the place of something that the kernel calls.
    """
    source = tree.module(KERNEL_MODULE)
    if source is None or (kernel := source.find(KERNEL)) is None:
        return []
    body = [node for node in source.syntax.body if node is not kernel and not is_docstring(node)]
    return [kernel, *(node.name if isinstance(node, ast.ClassDef | FunctionNode) else node for node in body)]


def _as_released(source: ModuleSource, tree: SourceTree, *seen: Evidence) -> Finding:
    """Return BROKEN with the shape of a release whose parts are all the same, or UNRECOGNISED."""
    parts = fingerprints(source, tree)
    for known in KNOWN:
        if parts == known.parts:
            return broken(known.shape, *seen, Evidence(seen=f"as in {known.releases}"))
    strange = [name for name, value in parts.items() if all(value != known.parts[name] for known in KNOWN)]
    why = (
        f"in no release that was read: {', '.join(strange)}"
        if strange
        else "a mixture of parts from different releases"
    )
    return unrecognised(Evidence(seen=why, file=source.path), *seen)


def _deferred(tree: SourceTree, source: ModuleSource, core_forward: FunctionNode, backward: FunctionNode) -> Finding:
    """Return FIXED for a known repair; one looks so if the backward pass hands its gradient over and it is applied."""
    products = (each.node for statement in core_forward.body for each in _PRODUCT.find(statement))
    applied = next((each for each in products if "token_grad_output" in words(each)), None)
    handed = next((call.node for call in _CORE_CALLED.find(backward) if _hands_over(call)), None)
    if applied is None or not isinstance(handed, ast.AST):
        missing = "applied" if applied is None else "handed over by the backward pass"
        raise unknown(source, core_forward, f"token_grad_output is not {missing}")
    return judged(
        tree,
        _REPAIRED,
        at(source, applied, "the gradient of the logits is multiplied by token_grad_output"),
        at(source, handed, "the backward pass hands over grad_output"),
        texts=_TEXTS,
        bodies=_BODIES,
    )


def _hands_over(call: Match) -> bool:
    return "token_grad_output=grad_output" in {ast.unparse(each) for each in call.many("given")}


def _rejection(function: FunctionNode) -> ast.Assert | None:
    """Return an assertion about the number of dimensions of `grad_output`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            asked = words(node.test)
            if "grad_output" in asked and asked & {"ndim", "dim", "numel", "shape"}:
                return node
    return None


def _first(form: Pattern, function: FunctionNode) -> ast.AST | None:
    return next((found.node for found in form.find(function)), None)
