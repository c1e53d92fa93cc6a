"""Does the fused linear cross entropy of liger-kernel scale each token's gradient by its own upstream gradient?

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
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeGuard

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.findings import conclusion
from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
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


class Known(NamedTuple):
    """Releases whose parts are the same, and the shape they have. Parts are fingerprints, see `fingerprints`."""

    releases: str
    shape: str
    parts: Mapping[str, str]


def _parts(core_forward: str, core_backward: str, function: str, kernel: str, rest: str) -> Mapping[str, str]:
    return {
        CORE_FORWARD: core_forward,
        CORE_BACKWARD: core_backward,
        FUNCTION: function,
        KERNEL: kernel,
        "the rest": rest,
    }


KNOWN = (
    Known(
        "0.5.3 to 0.5.5",
        DETACHED,
        _parts("202a77230d6848ca", "1287d9753299dc74", "71e4dbbb5c2955c5", "91ab6fcef0f329bc", "d24c1667542ffe60"),
    ),
    Known(
        "0.5.6 to 0.5.8",
        DETACHED,
        _parts("202a77230d6848ca", "1287d9753299dc74", "71e4dbbb5c2955c5", "576c12850df29c94", "d24c1667542ffe60"),
    ),
    Known(
        "0.6.3",
        INPUT_NEEDS_GRADIENT,
        _parts("ca1ec270fdb96b18", "1287d9753299dc74", "e87da7d90ec6356c", "c3ae95024bca70d5", "d24c1667542ffe60"),
    ),
    Known(
        "0.6.4",
        BIAS_NEEDS_GRADIENT,
        _parts("b5526b06177ee647", "1287d9753299dc74", "fb3e28f7c4facab2", "0521a7dc7238e979", "d24c1667542ffe60"),
    ),
    Known(
        "0.6.5 and 0.7.0",
        BIAS_NEEDS_GRADIENT,
        _parts("b5526b06177ee647", "1287d9753299dc74", "fb3e28f7c4facab2", "b8a5e10d1eda0455", "6a4501d807cf3507"),
    ),
    Known(
        "0.8.0",
        DETACHED,
        _parts("aafd981bbe3b5807", "1287d9753299dc74", "aac67427a9ed02f0", "5b30e7931b3698fe", "6a4501d807cf3507"),
    ),
    Known(
        "0.8.1",
        DETACHED,
        _parts("5af575ba2dfb0eac", "1287d9753299dc74", "aac67427a9ed02f0", "213d41ef2f41f5c7", "9af9e61faea51d8d"),
    ),
)


def probe(tree: SourceTree) -> Finding:
    """Return whether per-token gradients are right in the liger-kernel of a tree."""
    try:
        return _probe(tree)
    except SourceError as error:
        return conclusion(Verdict.UNRECOGNISED, None, Evidence(seen=str(error)))


def _probe(tree: SourceTree) -> Finding:
    source = tree.module(MODULE)
    if source is None:
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no {MODULE}"))
    forward, backward = source.function(f"{FUNCTION}.forward"), source.function(f"{FUNCTION}.backward")
    if forward is None or backward is None:
        return _unrecognised(source, None, f"{FUNCTION} has no forward or no backward")
    if "reduction" not in set(_words(source.syntax)):
        return conclusion(Verdict.ABSENT, None, _at(source, forward, "there is no choice of reduction"))
    core_forward, core_backward = source.function(CORE_FORWARD), source.function(CORE_BACKWARD)
    if core_forward is None or core_backward is None:
        return _unrecognised(source, forward, f"{CORE_FORWARD} or {CORE_BACKWARD} is missing")
    if "token_grad_output" in parameters(core_forward):
        return _deferred(source, core_forward, backward)
    for function in (backward, core_backward):
        if (guard := _rejection(function)) is not None:
            seen = _at(source, guard, "the backward pass refuses an upstream gradient per token")
            return conclusion(Verdict.BROKEN, REJECTED, seen)
    if (scaling := _scaled_by_one(core_backward)) is None:
        return _unrecognised(source, core_backward, f"{CORE_BACKWARD} does not scale its gradients as known")
    one_scale = _at(source, scaling, "every gradient is scaled by the one number at grad_output")
    if (branch := _per_token_branch(core_forward)) is not None:
        per_token = _at(source, branch, 'reduction="none" returns a loss per token')
        return _known(source, tree, (per_token, one_scale))
    if (total := _only_sum(core_forward)) is not None:
        summed = _at(source, total, 'reduction="none" returns the sum of the losses')
        return conclusion(Verdict.BROKEN, SCALAR_NONE, summed, one_scale)
    return _unrecognised(source, core_forward, 'what reduction="none" returns is not clear')


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
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [kernel, *(node.name if isinstance(node, named) else node for node in body)]


def _known(source: ModuleSource, tree: SourceTree, seen: tuple[Evidence, ...]) -> Finding:
    """Return BROKEN with the shape of a release whose parts are all the same, or UNRECOGNISED."""
    parts = fingerprints(source, tree)
    for known in KNOWN:
        if parts == known.parts:
            return conclusion(Verdict.BROKEN, known.shape, *seen, Evidence(seen=f"as in {known.releases}"))
    strange = [name for name, value in parts.items() if all(value != known.parts[name] for known in KNOWN)]
    if not strange:
        return _unrecognised(source, None, "a mixture of parts from different releases", *seen)
    return _unrecognised(source, None, f"in no release that was read: {', '.join(strange)}", *seen)


def _deferred(source: ModuleSource, core_forward: FunctionNode, backward: FunctionNode) -> Finding:
    """Return FIXED if `token_grad_output` is applied, and the backward pass hands its gradient to it."""
    applied = [
        node
        for statement in core_forward.body
        for node in ast.walk(statement)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(isinstance(name, ast.Name) and name.id == "token_grad_output" for name in ast.walk(node))
    ]
    handed = [
        node
        for node in ast.walk(backward)
        if _calls(node, CORE_FORWARD)
        and any(
            word.arg == "token_grad_output" and isinstance(word.value, ast.Name) and word.value.id == "grad_output"
            for word in node.keywords
        )
    ]
    if not applied or not handed:
        missing = "applied" if not applied else "handed over by the backward pass"
        return _unrecognised(source, core_forward, f"token_grad_output is not {missing}")
    return conclusion(
        Verdict.FIXED,
        None,
        _at(source, applied[0], "the gradient of the logits is multiplied by token_grad_output"),
        _at(source, handed[0], "the backward pass hands over grad_output"),
    )


def _rejection(function: FunctionNode) -> ast.Assert | None:
    """Return an assertion about the number of dimensions of `grad_output`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            asked = set(_words(node.test))
            if "grad_output" in asked and asked & {"ndim", "dim", "numel", "shape"}:
                return node
    return None


def _scaled_by_one(core_backward: FunctionNode) -> ast.Call | None:
    """Return the launch that gives `grad_output` as a whole to a kernel made for one number."""
    for node in ast.walk(core_backward):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "element_mul_kernel"
            and any(isinstance(argument, ast.Name) and argument.id == "grad_output" for argument in node.args)
        ):
            return node
    return None


def _per_token_branch(core_forward: FunctionNode) -> ast.If | None:
    """Return `if reduction == "none":` with an assignment of the losses as they are."""
    for node in ast.walk(core_forward):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "reduction == 'none'":
            assigned = [ast.unparse(statement) for statement in node.body]
            if "loss = loss_1d" in assigned:
                return node
    return None


def _only_sum(core_forward: FunctionNode) -> ast.Assign | None:
    """Return the assignment of the sum of the losses, if nothing else is ever assigned to `loss`."""
    found = [
        node
        for node in ast.walk(core_forward)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "loss" for target in node.targets)
    ]
    if len(found) == 1 and ast.unparse(found[0].value) == "torch.sum(loss_1d)":
        return found[0]
    return None


def _calls(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _words(node: ast.AST) -> Iterator[str]:
    """Yield every name, argument, attribute and keyword below a node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.arg | ast.keyword) and inner.arg is not None:
            yield inner.arg


def _at(source: ModuleSource, node: ast.stmt | ast.expr, seen: str) -> Evidence:
    return Evidence(seen=seen, file=source.path, line=node.lineno)


def _unrecognised(source: ModuleSource, node: ast.stmt | None, why: str, *seen: Evidence) -> Finding:
    place = Evidence(seen=why, file=source.path, line=None if node is None else node.lineno)
    return conclusion(Verdict.UNRECOGNISED, None, place, *seen)
