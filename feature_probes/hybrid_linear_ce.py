"""Has Megatron's hybrid model the output layer that makes `cross_entropy_fusion_impl="linear"` work?

What was seen, from source:

    plain-output-layer  the tree has `LinearCrossEntropyModule`, and `HybridModel` makes a plain `ColumnParallelLinear`
                        and hands logits to a loss that does not know `linear`: dev from 2026-04-28 to 2026-08-21
    FIXED               the model makes a `LinearCrossEntropyModule` and asks it for the loss: dev from 2026-02-03 on,
                        when it was called `MambaModel`, to 2026-02-26; nothing since
    ABSENT              every release up to 0.19.2 and main: there is no such module, and `linear` is no choice

The seam runs upstream's own `forward`, which changes from month to month, on a view of the model. So what is read is
what a view relies on: `forward` uses the model through its attributes alone, leaves `labels` as they came, and ends
with output layer, scale and loss, each once; MTP does nothing with the output layer but to call it, and asks it for an
unscaled loss; the fused layer is a plain one with another `forward`. What these do with numbers is asked when they are
loaded, by the self-test.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import called, calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unrecognised
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

TARGET = Target(distribution="megatron-core", module="megatron.core.models.hybrid.hybrid_model", symbol="HybridModel")
LINEAR = "megatron.core.transformer.linear_cross_entropy"
LAYER = "LinearCrossEntropyModule"
PLAIN_LAYER = "ColumnParallelLinear"
PLAIN_OUTPUT_LAYER = "plain-output-layer"

_MAMBA, _MAMBA_MODEL = "megatron.core.models.mamba.mamba_model", "MambaModel"
_LANGUAGE, _LANGUAGE_MODEL = "megatron.core.models.common.language_module.language_module", "LanguageModule"
_MTP, _MTP_LOSS = "megatron.core.transformer.multi_token_prediction", "process_mtp_loss"
_ASKS = "output_cross_entropy_loss"
_SCALE, _LOSS = "_scale_logits", "compute_language_model_loss"

_BASES = (["LanguageModule"], ["LanguageModule", "GraphableMegatronModule"])
_POSITIONAL = ("self", "input_ids", "position_ids", "attention_mask", "decoder_input", "labels")
_LAYER_TAKES = (
    "self",
    "input_",
    "weight",
    "runtime_gather_output",
    _ASKS,
    "labels",
    "reduction",
    "ignore_index",
)
_LAYER_MEMBERS = {"forward", "_compute_linear_and_cross_entropy_loss"}
_MTP_PASSES = {"weight", "runtime_gather_output", _ASKS, "labels"}
_MTP_GIVES_TO = "_compute_mtp_acceptance_counts"
"""What may get the output layer as an argument: it reads one attribute, and only where there are logits."""


class _UnknownError(Exception):
    """Something that no known form has."""

    def __init__(self, seen: Evidence) -> None:
        super().__init__(seen.seen)
        self.seen = seen


def probe(tree: SourceTree) -> Finding:
    """Return whether the hybrid model is wired to the fused linear cross entropy.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/3226 (wired on dev) and /pull/3574 (lost again).
    """
    try:
        linear = tree.module(LINEAR)
        if linear is None:
            return absent(f"there is no module {LINEAR}")
        source = tree.module(TARGET.module)
        if source is None:
            return _before_the_rename(tree)
        return _read(source, linear, tree)
    except _UnknownError as unknown:
        return unrecognised(unknown.seen)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))


def _before_the_rename(tree: SourceTree) -> Finding:
    """Return the finding for dev before 2026-04-28, where the model had another name."""
    source = tree.module(_MAMBA)
    if source is None:
        return absent(f"there is neither {TARGET.module} nor {_MAMBA}")
    init = _method(source, _MAMBA_MODEL, "__init__")
    if _mentions(init, LAYER) and _asks(_method(source, _MAMBA_MODEL, "forward")):
        return fixed(at(source, init, f"{_MAMBA_MODEL} makes its output layer a {LAYER} and asks it for the loss"))
    raise _UnknownError(at(source, init, f"the hybrid model is still {_MAMBA_MODEL}, and not wired to {LAYER}"))


def _read(source: ModuleSource, linear: ModuleSource, tree: SourceTree) -> Finding:
    init = _method(source, TARGET.symbol, "__init__")
    forward = _method(source, TARGET.symbol, "forward")
    wired, asked = _mentions(init, LAYER), bool(_asks(forward))
    if wired and asked:
        return fixed(at(source, init, f"{TARGET.symbol} makes its output layer a {LAYER} and asks it for the loss"))
    if wired or asked or _mentions(source.syntax, LAYER):
        raise _UnknownError(at(source, init, f"{TARGET.symbol} does a part of what makes {LAYER} work"))
    _check_class(source)
    made = _check_constructor(source, init)
    _check_forward(source, forward)
    _check_fused_layer(linear)
    _check_scale_and_loss(_needed(tree, _LANGUAGE))
    _check_mtp(_needed(tree, _MTP))
    seen = at(source, made, f"{TARGET.symbol} makes a plain output layer, though the tree has {LAYER}")
    return broken(PLAIN_OUTPUT_LAYER, seen)


def _method(source: ModuleSource, owner: str, name: str) -> FunctionNode:
    found = plain_function(source, f"{owner}.{name}")
    if found is None:
        raise _UnknownError(Evidence(seen=f"there is no {owner}.{name}", file=source.path))
    return found


def _needed(tree: SourceTree, name: str) -> ModuleSource:
    if (source := tree.module(name)) is None:
        raise _UnknownError(Evidence(seen=f"there is no module {name}"))
    return source


def _check_class(source: ModuleSource) -> None:
    """Check that nothing stands between the model and the methods that are read in its base."""
    cls = source.find(TARGET.symbol)
    assert isinstance(cls, ast.ClassDef)  # noqa: S101 - its methods were found
    if [ast.unparse(base) for base in cls.bases] not in _BASES or cls.keywords:
        raise _UnknownError(at(source, cls, f"{TARGET.symbol} has other bases"))
    own = {getattr(node, "name", None) for node in cls.body}
    if own & {_SCALE, _LOSS, "__getattr__", "__getattribute__", "__setattr__"}:
        raise _UnknownError(at(source, cls, f"{TARGET.symbol} has a scale, a loss or attributes of its own"))


def _check_constructor(source: ModuleSource, init: FunctionNode) -> ast.stmt:
    made = [node for node in ast.walk(init) if _sets_output_layer(node)]
    match made:
        case [ast.Assign(targets=[_], value=ast.Call() as call) as only] if called(call) == PLAIN_LAYER:
            return only
    raise _UnknownError(at(source, init, f"the output layer is not made once, as a {PLAIN_LAYER}"))


def _sets_output_layer(node: ast.AST) -> bool:
    """Return whether a statement by itself, not by what is nested in it, sets `self.output_layer`."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return False
    return any(ast.unparse(target) == "self.output_layer" for target in targets)


def _check_forward(source: ModuleSource, forward: FunctionNode) -> None:
    if parameters(forward)[: len(_POSITIONAL)] != _POSITIONAL:
        raise _UnknownError(at(source, forward, "forward takes other arguments"))
    _check_end(source, forward)
    of_attributes = {id(node.value) for node in ast.walk(forward) if isinstance(node, ast.Attribute)}
    for node in ast.walk(forward):
        if _is(node, "super", "__class__") or (_is(node, "self") and id(node) not in of_attributes):
            raise _UnknownError(at(source, node, "forward uses the model other than through its attributes"))
        if _is(node, "labels") and not isinstance(getattr(node, "ctx", None), ast.Load):
            raise _UnknownError(at(source, node, "forward changes the labels"))


def _check_end(source: ModuleSource, forward: FunctionNode) -> None:
    """Check that forward ends with output layer, scale, logits without labels, and loss with them, each once."""
    first = next((n for n, node in enumerate(forward.body) if calls(node, "output_layer")), len(forward.body))
    end = [node for node in forward.body[first:] if not (isinstance(node, ast.If) and not _mentions(node, "logits"))]
    match [ast.unparse(node) for node in end]:
        case [made, scaled, without_labels, with_labels, returned]:
            fits = (
                isinstance(end[0], ast.Assign)
                and made.startswith("logits, _ = self.output_layer(")
                and scaled == f"logits = self.{_SCALE}(logits)"
                and without_labels.startswith("if labels is None:\n    return logits")
                and isinstance(end[2], ast.If)
                and not end[2].orelse
                and with_labels == f"loss = self.{_LOSS}(labels, logits)"
                and returned == "return loss"
            )
        case _:
            fits = False
    once = len(calls(forward, "output_layer")) == len(calls(forward, _SCALE)) == len(calls(forward, _LOSS)) == 1
    if not fits or not once:
        raise _UnknownError(at(source, forward, "forward ends in another way than with output layer, scale and loss"))


def _check_fused_layer(linear: ModuleSource) -> None:
    """Check what the output layer becomes: a plain one with another forward, so that only its class must change."""
    cls = linear.find(LAYER)
    if not isinstance(cls, ast.ClassDef) or [ast.unparse(base).rpartition(".")[2] for base in cls.bases] != [
        PLAIN_LAYER
    ]:
        raise _UnknownError(Evidence(seen=f"there is no {LAYER} that is a {PLAIN_LAYER}", file=linear.path))
    members = {getattr(node, "name", None) for node in cls.body if not isinstance(node, ast.Expr)}
    forward = _method(linear, LAYER, "forward")
    defaults = [ast.unparse(each) for each in forward.args.defaults]
    if members != _LAYER_MEMBERS or parameters(forward) != _LAYER_TAKES or "'none'" not in defaults:
        raise _UnknownError(at(linear, cls, f"{LAYER} has other members or takes other arguments"))


def _check_scale_and_loss(source: ModuleSource) -> None:
    scale = _method(source, _LANGUAGE_MODEL, _SCALE)
    asked = {node.attr for node in ast.walk(scale) if isinstance(node, ast.Attribute)}
    if asked != {"config", "use_mup", "mup_output_mult"} or calls(scale):
        raise _UnknownError(at(source, scale, "logits are scaled by something else than MuP's multiplier"))
    loss = _method(source, _LANGUAGE_MODEL, _LOSS)
    if any(isinstance(node, ast.Constant) and node.value == "linear" for node in ast.walk(loss)):
        raise _UnknownError(at(source, loss, f"{_LOSS} knows linear itself"))


def _check_mtp(source: ModuleSource) -> None:
    """Check how MTP asks for its loss, and that it takes a view of the output layer for the layer itself."""
    function = plain_function(source, _MTP_LOSS)
    if function is None:
        raise _UnknownError(Evidence(seen=f"there is no {_MTP_LOSS}", file=source.path))
    match _asks(function):
        case [ast.Call(func=ast.Name(id="output_layer"), args=[ast.Subscript(value=ast.Name())]) as call]:
            passed = {keyword.arg for keyword in call.keywords}
        case _:
            passed = set()
    if passed != _MTP_PASSES:
        raise _UnknownError(at(source, function, "MTP asks for its loss in another way"))
    known: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            known.add(id(node.value))
        elif isinstance(node, ast.Call):
            known |= {id(node.func), *(id(each) for each in node.args if called(node) == _MTP_GIVES_TO)}
    for node in ast.walk(function):
        if _is(node, "output_layer") and id(node) not in known:
            raise _UnknownError(at(source, node, "MTP does more with the output layer than to call it"))


def _asks(node: ast.AST) -> list[ast.Call]:
    """Return the calls that ask an output layer for the loss."""
    return [call for call in calls(node) if any(keyword.arg == _ASKS for keyword in call.keywords)]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(name in {getattr(each, kind, None) for kind in ("id", "attr", "name")} for each in ast.walk(node))


def _is(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names
