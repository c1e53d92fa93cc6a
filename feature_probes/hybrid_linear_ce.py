"""The output layer of Megatron's hybrid model, and whether it makes `cross_entropy_fusion_impl="linear"` work.

What was seen, from source:

    plain-output-layer  the tree has `LinearCrossEntropyModule`, and `HybridModel` makes a plain `ColumnParallelLinear`
                        and hands logits to a loss that does not know `linear`: dev from 2026-04-28 to 2026-08-21
    FIXED               the model makes a `LinearCrossEntropyModule` and asks it for the loss: dev from 2026-02-03 on,
                        when it was called `MambaModel`, to 2026-02-26; nothing since
    ABSENT              every release up to 0.19.2 and main: there is no such module, and `linear` is no choice

The seam runs upstream's own `forward`, which changes from month to month, on a view of the model. So what is read is
what a view relies on: `forward` uses the model through its attributes alone, leaves `labels` as they came, and ends
with output layer, scale and loss, each once, and nowhere else but on an inner stage; the constructor goes on to its end,
where the seam looks for a plain output layer; MTP does nothing with the output layer but to call it, and asks it for an
unscaled loss; the fused layer is a plain one with another `forward`. What these do with numbers, and what the unfused loss
does, was read: each body on the way must be a known one. The self-test asks them again when they are loaded.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import hopper_flce_dispatch
from megacpp_overlays.feature_probes.definitions import (
    binders,
    called,
    calls,
    plain_class,
    plain_function,
    ways_out,
    words,
)
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_known
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.patterns import Pattern
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
_LAYER_TAKES = ("self", "input_", "weight", "runtime_gather_output", _ASKS, "labels", "reduction", "ignore_index")
_NOT_OF_ITS_OWN = {_SCALE, _LOSS, "__getattr__", "__getattribute__", "__setattr__"}
_LAYER_MEMBERS = {"forward", "_compute_linear_and_cross_entropy_loss"}
_MTP_PASSES = {"weight", "runtime_gather_output", _ASKS, "labels"}
_MTP_GIVES_TO = "_compute_mtp_acceptance_counts"
"""What may get the output layer as an argument: it reads one attribute, and only where there are logits."""


def _places(module: str, model: str) -> tuple[str, ...]:
    """Return what makes and asks the fused layer, the layer, and the loss behind it."""
    fused = "megatron.core.fusions.fused_linear_cross_entropy"
    of_model = (f"{module}:{model}.__init__", f"{module}:{model}.forward")
    return (*of_model, f"{LINEAR}:", f"{fused}:linear_cross_entropy", f"{fused}:LinearCrossEntropy")


_REPAIRED = table(
    _places(_MAMBA, _MAMBA_MODEL),
    {
        "dev 13ad653790 (2026-02-03)": "f8891108f40287b9 4b84437b832ed972 70bbc51de57defca "
        "3830e627e2457303 4c3772ba8564600f",
        "head of pull request 3226 (2026-02-03)": "248e20724d7a6f16 6b2cf682767603d9 30c523911d0c9022 "
        "3830e627e2457303 4c3772ba8564600f",
        "dev 8a29fd5752 (2026-02-04)": "248e20724d7a6f16 7477257f73a6d138 30c523911d0c9022 "
        "3830e627e2457303 4c3772ba8564600f",
    },
)
"""Dev up to 2026-02-26, when the model was still of that name. No tree with the newer name was repaired."""

_DEV = "dev since 2026-04-28"
_KNOWN = {
    LINEAR: {LAYER: {"916cbcd965ef1fec": _DEV, "14ebf5cd6e6d839e": "our stand-in"}},
    _LANGUAGE: {
        f"{_LANGUAGE_MODEL}.{_LOSS}": {
            "65b5b8c0d233d664": f"{_DEV} to 4c2022d6c0",
            "6e6ccd7e5ac60b00": "dev 4c2022d6c0 (2026-05-14)",
            "24eac97dca0b7d56": "dev 2f1004963d (2026-06-09) to d48bd6be0a",
            "3282541e3669077d": "our stand-in",
        },
        f"{_LANGUAGE_MODEL}.{_SCALE}": {"9744875acac3cd99": _DEV, "e88e5b167d9f361c": "our stand-in"},
    },
    _MTP: {
        _MTP_LOSS: {
            "a8166b02c3d5f184": "dev c0c4fdc45e (2026-04-13)",
            "36d746467b36bc9d": "dev d23ca853fe (2026-06-04)",
            "fc098a5fe4795938": "dev 959a542a11 (2026-06-08)",
            "ace5856d80dbe484": "dev 2f1004963d (2026-06-09)",
            "f5515f4494e6aba7": "dev 7eedac586d (2026-06-11)",
            "d30660631dcc21f7": "dev 0afb41b97e (2026-07-23)",
            "0037d6e56d103785": "dev cae55c1f09 (2026-08-10) to d48bd6be0a",
            "5e24b521323210f6": "our stand-in",
        }
    },
    hopper_flce_dispatch.TARGET.module: hopper_flce_dispatch.KNOWN,
}
"""Bodies that numbers go through on their way to a loss, fused or not: whatever one adds, the other must have."""

_MADE = Pattern("self.output_layer = $layer")
_END = Pattern(f"""
logits, _ = self.output_layer($$given)
logits = self.{_SCALE}(logits)
if labels is None:
    return $logits
loss = self.{_LOSS}(labels, logits)
return loss
""")
_INNER_STAGE = Pattern("if not self.post_process: return $hidden_states")
"""The one other way out of forward: there is no output layer, and no view."""
_MTP_ASKS = Pattern("output_layer($states[$place], $$passed)")


def probe(tree: SourceTree) -> Finding:
    """Return whether the hybrid model is wired to the fused linear cross entropy.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/3226 (wired on dev) and /pull/3574 (lost again).
    """
    linear = tree.module(LINEAR)
    if linear is None:
        return absent(f"there is no module {LINEAR}")
    source = tree.module(TARGET.module)
    if source is None:
        return _before_the_rename(tree)
    init = _method(source, TARGET.symbol, "__init__")
    forward = _method(source, TARGET.symbol, "forward")
    wired, asked = LAYER in words(init), bool(_asks(forward))
    if wired and asked:
        seen = at(source, init, f"{TARGET.symbol} makes its output layer a {LAYER} and asks it for the loss")
        return judged(tree, _REPAIRED, seen, places=_places(TARGET.module, TARGET.symbol))
    if wired or asked or LAYER in words(source.syntax):
        raise unknown(source, init, f"{TARGET.symbol} does a part of what makes {LAYER} work")
    _check_class(source)
    made = _made_once(source, init)
    _check_forward(source, forward)
    _check_fused_layer(linear)
    _check_scale_and_loss(_needed(tree, _LANGUAGE))
    _check_mtp(_needed(tree, _MTP))
    for module, known in _KNOWN.items():
        for symbol, bodies in known.items():
            check_known(_needed(tree, module), symbol, bodies)
    return broken(
        PLAIN_OUTPUT_LAYER, at(source, made, f"{TARGET.symbol} makes a plain output layer, though the tree has {LAYER}")
    )


def _before_the_rename(tree: SourceTree) -> Finding:
    """Return the finding for dev before 2026-04-28, where the model had another name."""
    source = tree.module(_MAMBA)
    if source is None:
        return absent(f"there is neither {TARGET.module} nor {_MAMBA}")
    init = _method(source, _MAMBA_MODEL, "__init__")
    if LAYER in words(init) and _asks(_method(source, _MAMBA_MODEL, "forward")):
        seen = at(source, init, f"{_MAMBA_MODEL} makes its output layer a {LAYER} and asks it for the loss")
        return judged(tree, _REPAIRED, seen, places=_places(_MAMBA, _MAMBA_MODEL))
    raise unknown(source, init, f"the hybrid model is still {_MAMBA_MODEL}, and not wired to {LAYER}")


def _method(source: ModuleSource, owner: str, name: str) -> FunctionNode:
    if (found := plain_function(source, f"{owner}.{name}")) is None:
        raise unknown(source, None, f"there is no {owner}.{name}")
    return found


def _needed(tree: SourceTree, name: str) -> ModuleSource:
    if (found := tree.module(name)) is None:
        raise SourceError(f"there is no module {name}")
    return found


def _check_class(source: ModuleSource) -> None:
    """Check that nothing stands between the model and the methods that are read in its base."""
    cls = plain_class(source, TARGET.symbol)
    if cls is None or [ast.unparse(base) for base in cls.bases] not in _BASES or cls.keywords:
        raise unknown(source, cls, f"{TARGET.symbol} has other bases")
    if {getattr(node, "name", None) for node in cls.body} & _NOT_OF_ITS_OWN:
        raise unknown(source, cls, f"{TARGET.symbol} has a scale, a loss or attributes of its own")


def _made_once(source: ModuleSource, init: FunctionNode) -> ast.AST:
    """Return the one statement that makes the output layer, a plain one, in a constructor that goes on to its end."""
    for left in ways_out(init):
        raise unknown(source, left, "the constructor may end before its end, with an output layer of another kind")
    set_by = [node for node in ast.walk(init) if _is_set(node, "output_layer")]
    match [found["layer"] for found in _MADE.find(init)]:
        case [ast.Call() as layer] if called(layer) == PLAIN_LAYER and len(set_by) == 1:
            return set_by[0]
    raise unknown(source, init, f"the output layer is not made once, as a {PLAIN_LAYER}")


def _is_set(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load)


def _check_forward(source: ModuleSource, forward: FunctionNode) -> None:
    if parameters(forward)[: len(_POSITIONAL)] != _POSITIONAL:
        raise unknown(source, forward, "forward takes other arguments")
    _check_end(source, forward)
    of_attributes = [node.value for node in ast.walk(forward) if isinstance(node, ast.Attribute)]
    for node in ast.walk(forward):
        if _is(node, "super", "__class__") or (_is(node, "self") and node not in of_attributes):
            raise unknown(source, node, "forward uses the model other than through its attributes")
    if changed := binders(forward.body, "labels"):
        raise unknown(source, changed[0], "forward changes the labels")


def _check_end(source: ModuleSource, forward: FunctionNode) -> None:
    """Check that forward ends with output layer, scale, logits without labels, and loss with them, each once.

    A way out before that would be given the view: what it asks of an output layer that answers with the loss, and what
    it does with the answer, nobody read.
    """
    first = next((n for n, node in enumerate(forward.body) if calls(node, "output_layer")), len(forward.body))
    end = [node for node in forward.body[first:] if not (isinstance(node, ast.If) and "logits" not in words(node))]
    found = _END.match(end)
    once = all(len(calls(forward, name)) == 1 for name in ("output_layer", _SCALE, _LOSS))
    if found is None or not found.text("logits").startswith("logits") or not once:
        raise unknown(source, forward, "forward ends in another way than with output layer, scale and loss")
    known = [node for each in (*end, *filter(_INNER_STAGE.match, forward.body)) for node in ast.walk(each)]
    if early := [node for node in ways_out(forward) if node not in known]:
        raise unknown(source, early[0], "forward has another way out than its end and that of an inner stage")


def _check_fused_layer(linear: ModuleSource) -> None:
    """Check what the output layer becomes: a plain one with another forward, so that only its class must change."""
    cls = plain_class(linear, LAYER)
    if cls is None or [ast.unparse(base).rpartition(".")[2] for base in cls.bases] != [PLAIN_LAYER]:
        raise unknown(linear, None, f"there is no {LAYER} that is a {PLAIN_LAYER}")
    members = {getattr(node, "name", None) for node in cls.body if not isinstance(node, ast.Expr)}
    forward = _method(linear, LAYER, "forward")
    defaults = [ast.unparse(each) for each in forward.args.defaults]
    if members != _LAYER_MEMBERS or parameters(forward) != _LAYER_TAKES or "'none'" not in defaults:
        raise unknown(linear, cls, f"{LAYER} has other members or takes other arguments")


def _check_scale_and_loss(source: ModuleSource) -> None:
    scale = _method(source, _LANGUAGE_MODEL, _SCALE)
    asked = {node.attr for node in ast.walk(scale) if isinstance(node, ast.Attribute)}
    if asked != {"config", "use_mup", "mup_output_mult"} or calls(scale):
        raise unknown(source, scale, "logits are scaled by something else than MuP's multiplier")
    loss = _method(source, _LANGUAGE_MODEL, _LOSS)
    if any(isinstance(node, ast.Constant) and node.value == "linear" for node in ast.walk(loss)):
        raise unknown(source, loss, f"{_LOSS} knows linear itself")


def _check_mtp(source: ModuleSource) -> None:
    """Check how MTP asks for its loss, and that it takes a view of the output layer for the layer itself."""
    function = plain_function(source, _MTP_LOSS)
    if function is None:
        raise unknown(source, None, f"there is no {_MTP_LOSS}")
    asked = [_MTP_ASKS.match(call) for call in _asks(function)]
    asked = [found if found and isinstance(found["states"], ast.Name) else None for found in asked]
    passed = [{getattr(each, "arg", "") for each in found.many("passed")} if found else set() for found in asked]
    if passed != [_MTP_PASSES]:
        raise unknown(source, function, "MTP asks for its loss in another way")
    known = [node.value for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    known += [call.func for call in calls(function)]
    known += [each for call in calls(function, _MTP_GIVES_TO) for each in call.args]
    for node in ast.walk(function):
        if _is(node, "output_layer") and node not in known:
            raise unknown(source, node, "MTP does more with the output layer than to call it")


def _asks(node: ast.AST) -> list[ast.Call]:
    """Return the calls that ask an output layer for the loss."""
    return [call for call in calls(node) if any(keyword.arg == _ASKS for keyword in call.keywords)]


def _is(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names
