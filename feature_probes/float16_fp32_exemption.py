"""Cast of fp32 parameters by `Float16Module`.

Three forms are known. Every statement of the constructor must be accounted for; one that is not, one too many or
one too few makes the form unknown.

    blanket-cast     `module.half()` or `module.bfloat16()`: releases 0.13.0 to 0.19.2
    marks-honoured   a conversion that leaves alone whatever carries `keep_in_fp32`: main since 2026-08-10 and dev
                     since 2026-07-09; nothing marks Mamba-3, so its parameters are cast all the same
    looks repaired   the same, and mamba-ssm's Mamba3 marks its own parameters: no release does yet, so that FIXED is said
                     of none
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.feature_probes import float16_distributed_order, float16_optimizer_state_ids
from megacpp_overlays.feature_probes.definitions import plain_class
from megacpp_overlays.feature_probes.findings import absent, at, broken, finding_of, unknown, unrecognised
from megacpp_overlays.feature_probes.known_bodies import plain_subclass
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.fp32_marks import MAMBA3, MAMBA3_ALWAYS, MAMBA3_MIMO, MARK
from megacpp_overlays.frozen import replace
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source.patterns import Match, Pattern
from megacpp_overlays.source.trees import ModuleSource, SourceTree

TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.module", symbol="Float16Module")

BLANKET_CAST = "blanket-cast"
MARKS_HONOURED = "marks-honoured"

_REPAIRED: Repairs = {}
"""No mamba-ssm that marks its parameters was read yet."""

_CONVERSION = "convert_module_to_dtype_except_fp32_marked"
_METHODS = {
    "__init__",
    "set_input_tensor",
    "forward",
    "state_dict",
    "state_dict_for_save_checkpoint",
    "sharded_state_dict",
    "load_state_dict",
}
_SET_ALWAYS = {
    "config": "config",
    "fp16": "config.fp16",
    "bf16": "config.bf16",
    "vp_stage": "getattr(module, 'vp_stage', None)",
}
_SET_SINCE_0_16 = {
    "vp_size": "config.virtual_pipeline_model_parallel_size",
    "pg_collection": "getattr(module, 'pg_collection', None)",
}
_CASTS = {("module.half()", "module.bfloat16()"): BLANKET_CAST} | {
    (f"{_CONVERSION}(module, torch.{half})", f"{_CONVERSION}(module, torch.bfloat16)"): MARKS_HONOURED
    for half in ("half", "float16")
}

_CONSTRUCTOR = Pattern("""
def __init__(self, config, module):
    super($$of).__init__(config)
    $$settings
    if self.fp16:
        self.add_module('module', $half)
        def float16_convertor(val): return val.half()
    elif self.bf16:
        self.add_module('module', $cast)
        def float16_convertor(val): return val.bfloat16()
    else:
        raise $error
    self.float16_convertor = float16_convertor
""")
_SETTING = Pattern("self.$name = $value")
_CONVERTS = Pattern(f"""
def {_CONVERSION}(module, dtype):
    return module._apply(lambda $x: $x.to(dtype) if $first and $second else $x)
""")

_MARKS = (
    Pattern(f"self.$name.{MARK} = True"),
    Pattern("self.$name = mark_keep_in_fp32($$_)"),
    Pattern("self.$name = $_.mark_keep_in_fp32($$_)"),
    Pattern("mark_keep_in_fp32(self.$name)"),
    Pattern("$_.mark_keep_in_fp32(self.$name)"),
)
_MARKS_IN_A_LOOP = Pattern(f"for $each in $parameters: $each.{MARK} = True")
_PARAMETER = Pattern("self.$name")


def probe(tree: SourceTree) -> Finding:
    """Return what `Float16Module.__init__` does to fp32 parameters.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5929 (main) and /pull/5308 (dev) for the marks.
    """
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, TARGET.symbol) is None:
        return absent(f"defines no {TARGET.symbol}", source)
    _check_class(source)
    shape, cast = _read_constructor(source)
    seen = at(source, cast, f"{TARGET.symbol}.__init__ casts with {ast.unparse(cast)}")
    if shape == BLANKET_CAST:
        return _if_checkpoints_hold(tree, broken(BLANKET_CAST, seen))
    _check_conversion(source)
    finding = _who_marks(tree, seen)
    return _if_checkpoints_hold(tree, finding) if finding.verdict is Verdict.BROKEN else finding


def _if_checkpoints_hold(tree: SourceTree, finding: Finding) -> Finding:
    """Return the finding if both optimizers are known to save fp32 parameters, repaired or by themselves.

    A model that keeps some parameters in fp32 is what an unrepaired optimizer saves under wrong names, without an
    error; upstream's rounding is the lesser harm. One that only looks repaired may have been witnessed, which no probe
    can know: the overlay needs the overlays of both, and the loader lets it in only where a kept witness counts.
    """
    unproved: list[Evidence] = []
    for probe_neighbour in (float16_optimizer_state_ids.probe, float16_distributed_order.probe):
        neighbour = finding_of(probe_neighbour, tree)
        if neighbour.looks_repaired:
            why = Evidence(
                seen="fp32 parameters may be saved under wrong names here, unless a witness proves that they are not"
            )
            unproved += [why, *neighbour.evidence]
        elif neighbour.verdict is Verdict.UNRECOGNISED or _is_elsewhere(neighbour):
            why = Evidence(seen="fp32 parameters may be saved under wrong names here: an optimizer is not known")
            return unrecognised(*finding.evidence, why, *neighbour.evidence)
    return replace(finding, evidence=(*finding.evidence, *unproved)) if unproved else finding


def _is_elsewhere(neighbour: Finding) -> bool:
    """Return whether the module of an optimizer is there without its class, which something else must define then."""
    return neighbour.verdict is Verdict.ABSENT and any(each.file for each in neighbour.evidence)


def _check_class(source: ModuleSource) -> None:
    """Check that the class has known members alone, and that nothing else here is done with it."""
    cls = plain_subclass(source, TARGET.symbol, base="MegatronModule")
    inside = {id(node) for node in ast.walk(cls)}
    for node in ast.walk(source.syntax):
        if isinstance(node, ast.Name) and node.id == TARGET.symbol and id(node) not in inside:
            raise unknown(source, node, f"{TARGET.symbol} is used outside its class")
    for member in cls.body[ast.get_docstring(cls, clean=False) is not None :]:
        if not isinstance(member, ast.FunctionDef) or member.name not in _METHODS:
            raise unknown(source, member, f"{TARGET.symbol} has a member that no known version has")


def _read_constructor(source: ModuleSource) -> tuple[str, ast.AST]:
    """Return the shape of the constructor and its bf16 cast."""
    init = source.function(f"{TARGET.symbol}.__init__")
    found = _CONSTRUCTOR.match(init)
    if found is None or [ast.unparse(each) for each in found.many("of")] not in ([], [TARGET.symbol, "self"]):
        raise unknown(source, init, "the constructor is not a known one")
    settings = [_SETTING.match(each) for each in found.many("settings")]
    values = {each.text("name"): each.text("value") for each in settings if each is not None}
    if len(values) != len(settings) or values not in (_SET_ALWAYS, _SET_ALWAYS | _SET_SINCE_0_16):
        raise unknown(source, init, "the constructor sets other attributes than any known one")
    casts = found.text("half"), found.text("cast")
    if casts not in _CASTS:
        raise unknown(source, init, f"the constructor casts with {' or '.join(casts)}")
    return _CASTS[casts], found["cast"]


def _check_conversion(source: ModuleSource) -> None:
    """Check that the conversion casts every floating tensor except marked ones."""
    function = source.function(_CONVERSION)
    found = _CONVERTS.match(function)
    if function not in source.syntax.body or found is None:
        raise unknown(source, function, f"{_CONVERSION} is not a known one")
    name = found.text("x")
    if {found.text("first"), found.text("second")} != {
        f"{name}.is_floating_point()",
        f"not getattr({name}, '{MARK}', False)",
    }:
        raise unknown(source, function, f"{_CONVERSION} chooses by another rule")


def _who_marks(tree: SourceTree, seen: Evidence) -> Finding:
    """Return the finding for a Megatron that honours marks: does Mamba-3 set them?"""
    module_name, _, class_name = MAMBA3.rpartition(".")
    source = tree.module(module_name)
    init = source.function(f"{class_name}.__init__") if source else None
    if source is None or init is None:
        return broken(MARKS_HONOURED, seen, Evidence(seen=f"there is no {MAMBA3} that marks"))
    always = {name for statement in init.body for name in _marked_by(statement)}
    anywhere = {name for node in ast.walk(init) if isinstance(node, ast.stmt) for name in _marked_by(node)}
    missing = [name for name in MAMBA3_ALWAYS if name not in always]
    missing += [name for name in MAMBA3_MIMO if name not in anywhere]
    if not missing:
        places = (
            f"{TARGET.module}:{TARGET.symbol}.__init__",
            f"{TARGET.module}:{_CONVERSION}",
            f"{module_name}:",
        )
        marks = at(source, init, f"{class_name} marks its fp32 parameters")
        return judged(tree, _REPAIRED, seen, marks, places=places)
    if MARK in source.text and not anywhere:
        return unrecognised(seen, at(source, source.syntax, f"uses {MARK} in an unknown way"))
    return broken(MARKS_HONOURED, seen, at(source, init, f"{class_name} does not mark {', '.join(missing)}"))


def _marked_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names `x` of `self.x` that one statement marks by itself, not by what is nested in it."""
    marks: list[Match | None] = [pattern.match(statement) for pattern in _MARKS]
    if (loop := _MARKS_IN_A_LOOP.match(statement)) is not None:
        marks += [_PARAMETER.match(each) for each in getattr(loop["parameters"], "elts", ())]
    yield from (mark.text("name") for mark in marks if mark is not None)
