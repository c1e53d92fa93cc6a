"""Does `Float16Module` cast parameters that must stay in fp32?

Three forms are known. Every statement of the constructor must be accounted for; one that is not, one too many or
one too few makes the form unknown.

    blanket-cast     `module.half()` or `module.bfloat16()`: releases 0.13.0 to 0.19.2
    marks-honoured   a conversion that leaves alone whatever carries `keep_in_fp32`: main since 2026-08-10 and dev
                     since 2026-07-09; nothing marks Mamba-3, so its parameters are cast all the same
    FIXED            the same, and mamba-ssm's Mamba3 marks its own parameters: no release does yet
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import float16_distributed_order, float16_optimizer_state_ids
from megacpp_overlays.feature_probes.findings import conclusion
from megacpp_overlays.fp32_marks import MAMBA3, MAMBA3_ALWAYS, MAMBA3_MIMO, MARK
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.module", symbol="Float16Module")

BLANKET_CAST = "blanket-cast"
MARKS_HONOURED = "marks-honoured"

_CONVERSION = "convert_module_to_dtype_except_fp32_marked"
_MARKER = "mark_keep_in_fp32"
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
_CASTS = {
    "half": {"module.half()": BLANKET_CAST}
    | {f"{_CONVERSION}(module, torch.{dtype})": MARKS_HONOURED for dtype in ("half", "float16")},
    "bfloat16": {"module.bfloat16()": BLANKET_CAST, f"{_CONVERSION}(module, torch.bfloat16)": MARKS_HONOURED},
}


class _UnknownFormError(Exception):
    """Something that no known form has."""

    def __init__(self, seen: str, node: ast.AST) -> None:
        super().__init__(seen)
        self.line: int | None = getattr(node, "lineno", None)


def probe(tree: SourceTree) -> Finding:
    """Return what `Float16Module.__init__` does to fp32 parameters.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5929 (main) and /pull/5308 (dev) for the marks.
    """
    source = tree.module(TARGET.module)
    if source is None:
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no module {TARGET.module}"))
    try:
        cls = source.find(TARGET.symbol)
        if cls is None and not _bindings(source.syntax, TARGET.symbol):
            return conclusion(Verdict.ABSENT, None, _at(source, f"defines no {TARGET.symbol}", None))
        shape, cast = _read(source, cls)
    except _UnknownFormError as unknown:
        return conclusion(Verdict.UNRECOGNISED, None, _at(source, str(unknown), unknown.line))
    except SourceError as error:
        return conclusion(Verdict.UNRECOGNISED, None, Evidence(seen=str(error)))
    seen = _at(source, f"{TARGET.symbol}.__init__ casts with {ast.unparse(cast)}", cast.lineno)
    finding = conclusion(Verdict.BROKEN, shape, seen) if shape == BLANKET_CAST else _who_marks(tree, seen)
    return _if_checkpoints_hold(tree, finding) if finding.verdict is Verdict.BROKEN else finding


def _if_checkpoints_hold(tree: SourceTree, finding: Finding) -> Finding:
    """Return the finding if both optimizers are known to save fp32 parameters, repaired or by themselves.

    A model that keeps some parameters in fp32 is what an unrepaired optimizer saves under wrong names, without an
    error; upstream's rounding is the lesser harm.
    """
    for probe_neighbour in (float16_optimizer_state_ids.probe, float16_distributed_order.probe):
        neighbour = probe_neighbour(tree)
        if neighbour.verdict is Verdict.UNRECOGNISED:
            why = Evidence(seen="fp32 parameters may be saved under wrong names here: an optimizer is not known")
            return conclusion(Verdict.UNRECOGNISED, None, *finding.evidence, why, *neighbour.evidence)
    return finding


def _read(source: ModuleSource, cls: ast.AST | None) -> tuple[str, ast.Call]:
    """Return the shape of the class and its bf16 cast."""
    if not isinstance(cls, ast.ClassDef) or cls not in source.syntax.body:
        raise _UnknownFormError(f"{TARGET.symbol} is no plain class of this module", cls or source.syntax)
    if bindings := [node for node in _bindings(source.syntax, TARGET.symbol) if node is not cls]:
        raise _UnknownFormError(f"{TARGET.symbol} is used outside its class", bindings[0])
    if cls.decorator_list or cls.keywords or [ast.unparse(base) for base in cls.bases] != ["MegatronModule"]:
        raise _UnknownFormError(f"{TARGET.symbol} is decorated or has other bases than MegatronModule", cls)
    for node in _without_docstring(cls.body):
        if not isinstance(node, ast.FunctionDef) or node.name not in _METHODS:
            raise _UnknownFormError(f"{TARGET.symbol} has a member that no known version has", node)
    inits = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if len(inits) != 1:
        raise _UnknownFormError(f"{TARGET.symbol} has {len(inits)} constructors", cls)
    shape, cast = _read_constructor(inits[0])
    if shape == MARKS_HONOURED:
        _check_conversion(source)
    return shape, cast


def _read_constructor(init: ast.FunctionDef) -> tuple[str, ast.Call]:
    _check_signature(init, ("self", "config", "module"))
    body = _without_docstring(init.body)
    if len(body) < 4:
        raise _UnknownFormError("the constructor is shorter than any known one", init)
    start, *settings, choice, end = body
    _expect(start, f"super({TARGET.symbol}, self).__init__(config)", "super().__init__(config)")
    values = dict(_self_assignment(node) for node in settings)
    if len(values) != len(settings) or values not in (_SET_ALWAYS, _SET_ALWAYS | _SET_SINCE_0_16):
        raise _UnknownFormError("the constructor sets other attributes than any known one", init)
    _expect(end, "self.float16_convertor = float16_convertor")
    return _read_choice(choice)


def _read_choice(choice: ast.stmt) -> tuple[str, ast.Call]:
    if not (isinstance(choice, ast.If) and ast.unparse(choice.test) == "self.fp16" and len(choice.orelse) == 1):
        raise _UnknownFormError("the choice between fp16 and bf16 is not a known one", choice)
    otherwise = choice.orelse[0]
    if not (isinstance(otherwise, ast.If) and ast.unparse(otherwise.test) == "self.bf16"):
        raise _UnknownFormError("the choice between fp16 and bf16 is not a known one", otherwise)
    if not (len(otherwise.orelse) == 1 and isinstance(otherwise.orelse[0], ast.Raise)):
        raise _UnknownFormError("a model that is neither fp16 nor bf16 is not refused", otherwise)
    half, _ = _read_branch(choice, "half")
    bfloat16, cast = _read_branch(otherwise, "bfloat16")
    if half != bfloat16:
        raise _UnknownFormError("fp16 and bf16 are cast in different ways", choice)
    return half, cast


def _read_branch(branch: ast.If, dtype: str) -> tuple[str, ast.Call]:
    """Return the shape of one branch and its cast: registers the cast module, then defines how inputs are cast."""
    match branch.body:
        case [ast.Expr(value=ast.Call() as call), ast.FunctionDef(name="float16_convertor") as convertor]:
            pass
        case _:
            raise _UnknownFormError(f"the {dtype} branch is not a known one", branch)
    match call:
        case ast.Call(args=[ast.Constant(value="module"), ast.Call() as cast], keywords=[]) if (
            ast.unparse(call.func) == "self.add_module" and ast.unparse(cast) in _CASTS[dtype]
        ):
            pass
        case _:
            raise _UnknownFormError(f"the {dtype} cast is not a known one", call)
    _check_signature(convertor, ("val",))
    if len(convertor.body) != 1:
        raise _UnknownFormError("inputs are cast in another way", convertor)
    _expect(convertor.body[0], f"return val.{dtype}()")
    return _CASTS[dtype][ast.unparse(cast)], cast


def _check_conversion(source: ModuleSource) -> None:
    """Check that the conversion casts every floating tensor except marked ones."""
    function = source.function(_CONVERSION)
    if function is None or function not in source.syntax.body:
        raise _UnknownFormError(f"{_CONVERSION} is not defined here", source.syntax)
    if len(_bindings(source.syntax, _CONVERSION, loads=False)) != 1:
        raise _UnknownFormError(f"{_CONVERSION} is bound more than once", function)
    _check_signature(function, ("module", "dtype"))
    match _without_docstring(function.body):
        case [
            ast.Return(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="module"), attr="_apply"),
                    args=[
                        ast.Lambda(
                            args=ast.arguments(
                                posonlyargs=[], args=[ast.arg(arg=name)], vararg=None, kwonlyargs=[], kwarg=None
                            ),
                            body=ast.IfExp(test=ast.BoolOp(op=ast.And(), values=conditions)) as chosen,
                        )
                    ],
                    keywords=[],
                )
            )
        ]:
            pass
        case _:
            raise _UnknownFormError(f"{_CONVERSION} is not a known one", function)
    seen = ({ast.unparse(condition) for condition in conditions}, *map(ast.unparse, (chosen.body, chosen.orelse)))
    known = {f"{name}.is_floating_point()", f"not getattr({name}, '{MARK}', False)"}
    if seen != (known, f"{name}.to(dtype)", name) or len(conditions) != len(known):
        raise _UnknownFormError(f"{_CONVERSION} chooses by another rule", function)


def _who_marks(tree: SourceTree, seen: Evidence) -> Finding:
    """Return the finding for a Megatron that honours marks: does Mamba-3 set them?"""
    module_name, _, class_name = MAMBA3.rpartition(".")
    try:
        source = tree.module(module_name)
        init = source.function(f"{class_name}.__init__") if source else None
    except SourceError as error:
        return conclusion(Verdict.UNRECOGNISED, None, seen, Evidence(seen=str(error)))
    if source is None or init is None:
        return conclusion(Verdict.BROKEN, MARKS_HONOURED, seen, Evidence(seen=f"there is no {MAMBA3} that marks"))
    always = {name for statement in init.body for name in _marked_by(statement)}
    anywhere = {name for node in ast.walk(init) if isinstance(node, ast.stmt) for name in _marked_by(node)}
    missing = [name for name in MAMBA3_ALWAYS if name not in always]
    missing += [name for name in MAMBA3_MIMO if name not in anywhere]
    if not missing:
        return conclusion(
            Verdict.FIXED, None, seen, _at(source, f"{class_name} marks its fp32 parameters", init.lineno)
        )
    if MARK in source.text and not anywhere:
        return conclusion(Verdict.UNRECOGNISED, None, seen, _at(source, f"uses {MARK} in an unknown way", None))
    unmarked = _at(source, f"{class_name} does not mark {', '.join(missing)}", init.lineno)
    return conclusion(Verdict.BROKEN, MARKS_HONOURED, seen, unmarked)


def _marked_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names `x` of `self.x` that one statement marks by itself, not by what is nested in it."""
    match statement:
        case ast.Assign(targets=targets, value=ast.Constant(value=True)):
            for target in targets:
                match target:
                    case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr=mark):
                        if mark == MARK:
                            yield name
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call(func=function)
        ) if ast.unparse(function).rpartition(".")[2] == _MARKER:
            yield name
        case ast.Expr(value=ast.Call(func=function, args=[ast.Attribute(value=ast.Name(id="self"), attr=name)])) if (
            ast.unparse(function).rpartition(".")[2] == _MARKER
        ):
            yield name
        case ast.For(
            target=ast.Name(id=item), iter=ast.Tuple(elts=elements) | ast.List(elts=elements), body=[only]
        ) if ast.unparse(only) == f"{item}.{MARK} = True":
            for element in elements:
                match element:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        yield name


def _check_signature(function: FunctionNode, names: tuple[str, ...]) -> None:
    args = function.args
    plain = not (args.posonlyargs or args.defaults or args.kwonlyargs or function.decorator_list)
    if not plain or parameters(function) != names:
        raise _UnknownFormError(f"{function.name} has another signature or is decorated", function)


def _self_assignment(node: ast.stmt) -> tuple[str, str]:
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
            return name, ast.unparse(value)
        case _:
            raise _UnknownFormError("the constructor does something that no known one does", node)


def _expect(node: ast.stmt, *known: str) -> None:
    if ast.unparse(node) not in known:
        raise _UnknownFormError(f"expected {known[0]}", node)


def _bindings(syntax: ast.Module, name: str, *, loads: bool = True) -> list[ast.AST]:
    """Return the definitions, imports and other uses of a name, uses inside a class of that name aside."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(syntax.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.ClassDef(name=defined) if defined == name:
                found.append(node)
                continue
            case ast.FunctionDef(name=defined) | ast.AsyncFunctionDef(name=defined) if defined == name:
                found.append(node)
            case ast.Name(id=used, ctx=context) if used == name and (loads or not isinstance(context, ast.Load)):
                found.append(node)
            case ast.alias() if name in {node.name, node.asname}:
                found.append(node)
        waiting += ast.iter_child_nodes(node)
    return found


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
        case _:
            return body


def _at(source: ModuleSource, seen: str, line: int | None) -> Evidence:
    return Evidence(seen=seen, file=source.path, line=line)
