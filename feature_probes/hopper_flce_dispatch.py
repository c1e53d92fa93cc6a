"""Which GPUs does the dispatcher of Megatron's fused linear cross entropy know?

`Platform.__init__` compares the major compute capability of the current device with numbers, takes the entry of that
branch, and raises `ValueError: Unsupported architecture` for any other. What was seen:

    blackwell-only            10 alone: dev since 2025-12-05, core_dev_r0.16.0, the tags 26.04-alpha.rc1 and rc2
    blackwell-and-hopper      10, and 9 with an entry of upstream's own: the head of pull request 3345
    blackwell-only-at-import  10 alone, and asked while the module is imported: the heads of pull requests 2206, 2216
    ABSENT                    every release and main; pull request 4312 has another module under that name
    FIXED                     nothing yet: 8, 9 and 12 have branches

The seam hands out an entry with the contract of upstream's own, so that contract is read as well: what the autograd
function passes to an entry and takes from it, and the parameters of the Blackwell entry.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.findings import conclusion
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source.fingerprint import is_docstring
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.fusions.fused_linear_cross_entropy",
    symbol="Platform",
)
GETTER = "_get_platform"
FUNCTION = "LinearCrossEntropy"
ENTRIES = "megatron.core.fusions.linear_cross_entropy"

BLACKWELL_ONLY = "blackwell-only"
BLACKWELL_AND_HOPPER = "blackwell-and-hopper"
AT_IMPORT = "blackwell-only-at-import"

SERVED = frozenset({8, 9, 12})
"""Major compute capabilities that the portable entry serves: those for which all its parts are made."""
_SHAPES = {frozenset({10}): BLACKWELL_ONLY, frozenset({9, 10}): BLACKWELL_AND_HOPPER}

FORWARD = ("hidden", "weight", "labels", "tp_group", "reduction", "ignore_index", "sequence_parallel")
FORWARD_VALUES = 7
BACKWARD = (
    "dlogprobs",
    "global_hidden",
    "weight",
    "labels",
    "maximum",
    "accu",
    "num_valid_tokens",
    "reduction",
    "ignore_index",
    "tp_group",
    "tp_rank",
    "tp_world_size",
    "sequence_parallel",
)
BACKWARD_VALUES = 2
_ENTRY_ATTRIBUTES = {"forward": "forward_func", "backward": "backward_func"}


class _UnknownError(Exception):
    """Something that no known form has."""

    def __init__(self, seen: str, node: ast.AST | None = None, source: ModuleSource | None = None) -> None:
        super().__init__(seen)
        self.line: int | None = getattr(node, "lineno", None)
        self.source = source


def probe(tree: SourceTree) -> Finding:
    """Return which major compute capabilities the dispatcher has no branch for.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/2256 (dev) and /pull/3345 (a branch for 9).
    """
    try:
        source = tree.module(TARGET.module)
        if source is None:
            return conclusion(Verdict.ABSENT, None, Evidence(seen=f"there is no module {TARGET.module}"))
        return _read(source, tree)
    except _UnknownError as unknown:
        where = unknown.source or source
        path = None if where is None else where.path
        return conclusion(Verdict.UNRECOGNISED, None, Evidence(seen=str(unknown), file=path, line=unknown.line))
    except SourceError as error:
        return conclusion(Verdict.UNRECOGNISED, None, Evidence(seen=str(error)))


def _read(source: ModuleSource, tree: SourceTree) -> Finding:
    if TARGET.symbol not in _names(source.syntax):
        return conclusion(Verdict.ABSENT, None, Evidence(seen=f"defines no {TARGET.symbol}", file=source.path))
    branches, refusal = _dispatch(_constructor(source))
    majors = frozenset(branches)
    known = ", ".join(map(str, sorted(majors)))
    seen = Evidence(
        seen=f"the dispatcher knows compute capability {known} and refuses any other",
        file=source.path,
        line=refusal.lineno,
    )
    if majors >= SERVED:
        return conclusion(Verdict.FIXED, None, seen)
    if (shape := _SHAPES.get(majors)) is None:
        raise _UnknownError(f"no known dispatcher has branches for {known} alone", refusal)
    if shape == BLACKWELL_ONLY and source.function(GETTER) is None and _built_at_import(source):
        return conclusion(Verdict.BROKEN, AT_IMPORT, seen, Evidence(seen="it is asked while the module is imported"))
    _check_bound_once(source)
    _check_getter(source)
    _check_autograd_function(source)
    for package in sorted(set(branches.values())):
        _check_entry(tree, f"{ENTRIES}.{package}.entry")
    return conclusion(Verdict.BROKEN, shape, seen)


def _check_bound_once(source: ModuleSource) -> None:
    """Refuse a module that gives one of the names another value, or changes what it names from outside."""
    names = {TARGET.symbol, GETTER, FUNCTION}
    for node in ast.walk(source.syntax):
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)) if not isinstance(node.ctx, ast.Load):
                found = name
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]):
                found = name
            case ast.alias(name=name, asname=other):
                found = other or name
            case _:
                continue
        if found in names:
            raise _UnknownError(f"{found} is changed outside its definition", node)


def _constructor(source: ModuleSource) -> FunctionNode:
    cls = source.find(TARGET.symbol)
    if not isinstance(cls, ast.ClassDef) or cls not in source.syntax.body or cls.decorator_list or cls.bases:
        raise _UnknownError(f"{TARGET.symbol} is no plain class of this module", cls)
    methods = [node for node in cls.body if isinstance(node, FunctionNode)]
    if sorted(node.name for node in methods) != ["__init__", "__new__"]:
        raise _UnknownError(f"{TARGET.symbol} has other methods than __new__ and __init__", cls)
    init = next(node for node in methods if node.name == "__init__")
    if parameters(init) != ("self",) or init.decorator_list:
        raise _UnknownError(f"{TARGET.symbol}.__init__ takes parameters or is decorated", init)
    return init


def _dispatch(init: FunctionNode) -> tuple[dict[int, str], ast.Raise]:
    """Return the package of the entry by major capability, and the refusal of every other."""
    capability = _capability(init)
    left = [statement for statement in init.body if isinstance(statement, ast.If) and not _returns_early(statement)]
    if len(left) != 1:
        raise _UnknownError(f"{TARGET.symbol}.__init__ has {len(left)} comparisons of the capability", init)
    branches: dict[int, str] = {}
    rest: list[ast.stmt] = list(left)
    while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
        majors = _majors(branch.test, capability)
        if not majors:
            raise _UnknownError(f"a branch asks what is not known: {ast.unparse(branch.test)}", branch)
        for major in majors:
            branches[major] = _imported_entry(branch)
        rest = branch.orelse
    match rest:
        case [ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"))) as refusal]:
            pass
        case _:
            raise _UnknownError("other capabilities do not end in a ValueError", left[0])
    kept = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    if kept != {*_ENTRY_ATTRIBUTES.values(), "_initialized"}:
        raise _UnknownError(f"{TARGET.symbol} keeps {', '.join(sorted(kept)) or 'nothing'}", init)
    return branches, refusal


def _capability(init: FunctionNode) -> str:
    """Return the one name that holds the compute capability; everything else at its level must be known, too."""
    for statement in init.body:
        if not isinstance(statement, ast.If | ast.Assert | ast.Assign | ast.AnnAssign) and not is_docstring(statement):
            raise _UnknownError(f"{TARGET.symbol}.__init__ has a statement of an unknown kind", statement)
    names = [
        statement.targets[0].id
        for statement in init.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).endswith(".get_device_capability")
    ]
    stores = [node.id for node in ast.walk(init) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    if len(names) != 1 or stores.count(names[0]) != 1:
        raise _UnknownError(f"{TARGET.symbol}.__init__ does not ask once for the compute capability", init)
    return names[0]


def _returns_early(statement: ast.If) -> bool:
    """Return whether this leaves a singleton alone that was initialised before."""
    match statement:
        case ast.If(
            test=ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id="self"), *_]),
            body=[ast.Return(value=None)],
            orelse=[],
        ):
            return True
    return False


def _majors(test: ast.expr, capability: str) -> list[int]:
    """Return the numbers in `capability[0] == 9` or `capability[0] in (8, 9)`; nothing for any other test."""
    match test:
        case ast.Compare(
            left=ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)), ops=[ast.Eq()], comparators=[one]
        ) if name == capability:
            numbers = [one]
        case ast.Compare(
            left=ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)),
            ops=[ast.In()],
            comparators=[ast.Tuple(elts=several) | ast.List(elts=several) | ast.Set(elts=several)],
        ) if name == capability:
            numbers = several
        case _:
            return []
    values = [node.value if isinstance(node, ast.Constant) else None for node in numbers]
    return [value for value in values if isinstance(value, int)] if None not in values else []


def _imported_entry(branch: ast.If) -> str:
    """Return the package whose `entry` a branch imports: `blackwell`."""
    found = [node for statement in branch.body for node in ast.walk(statement) if isinstance(node, ast.ImportFrom)]
    match found:
        case [ast.ImportFrom(module=str(module), level=level, names=[ast.alias(name="entry")])]:
            full = {0: module, 1: f"{ENTRIES.rpartition('.')[0]}.{module}"}.get(level, "")
            parent, _, package = full.rpartition(".")
            if parent == ENTRIES:
                return package
    raise _UnknownError(f"a branch does not import one entry of {ENTRIES}", branch)


def _built_at_import(source: ModuleSource) -> bool:
    return any(
        isinstance(statement, ast.Assign) and _calls(statement.value, TARGET.symbol) for statement in source.syntax.body
    )


def _check_getter(source: ModuleSource) -> None:
    getter = source.function(GETTER)
    if getter is None or getter not in source.syntax.body or parameters(getter):
        raise _UnknownError(f"there is no function {GETTER} without parameters", getter)
    cached = [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in getter.decorator_list]
    match _without_docstring(getter.body):
        case [ast.Return(value=ast.Call() as call)] if _calls(call, TARGET.symbol) and cached in (
            ["lru_cache"],
            ["cache"],
        ):
            pass
        case _:
            raise _UnknownError(f"{GETTER} does more than keep one {TARGET.symbol}", getter)
    uses = [node for node in ast.walk(source.syntax) if isinstance(node, ast.Call) and _calls(node, TARGET.symbol)]
    if len(uses) != 1:
        raise _UnknownError(f"{TARGET.symbol} is built in {len(uses)} places", uses[-1])


def _check_autograd_function(source: ModuleSource) -> None:
    forward = source.function(f"{FUNCTION}.forward")
    backward = source.function(f"{FUNCTION}.backward")
    if forward is None or backward is None or parameters(forward) != ("ctx", *FORWARD):
        raise _UnknownError(f"{FUNCTION} does not take what is known", forward)
    expected = {
        _ENTRY_ATTRIBUTES["forward"]: (forward, FORWARD, FORWARD_VALUES),
        _ENTRY_ATTRIBUTES["backward"]: (backward, BACKWARD, BACKWARD_VALUES),
    }
    for attribute, (function, arguments, values) in expected.items():
        match [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _uses_getter(node)]:
            case [ast.Assign(targets=[ast.Tuple(elts=taken)], value=ast.Call(keywords=[]) as call)]:
                passed = tuple(ast.unparse(argument).lstrip("_") for argument in call.args)
                fits = ast.unparse(call.func) == f"{GETTER}().{attribute}"
                if fits and passed == arguments and len(taken) == values:
                    continue
        raise _UnknownError(f"{FUNCTION} does not pass {attribute} what is known, or takes other values", function)
    if (uses := sum(_is_getter(node) for node in ast.walk(source.syntax))) != len(expected):
        raise _UnknownError(f"{GETTER} is used in {uses} places")


def _check_entry(tree: SourceTree, name: str) -> None:
    source = tree.module(name)
    if source is None:
        raise _UnknownError(f"there is no module {name}")
    for function, expected in (("forward", FORWARD), ("backward", BACKWARD)):
        node = source.function(function)
        if node is None or parameters(node) != expected:
            raise _UnknownError(f"{name}.{function} does not take what is known", node, source)


def _names(syntax: ast.AST) -> set[str | None]:
    return {getattr(node, "id", getattr(node, "name", None)) for node in ast.walk(syntax)}


def _uses_getter(node: ast.AST) -> bool:
    return any(_is_getter(inner) for inner in ast.walk(node))


def _is_getter(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == GETTER


def _calls(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node) == f"{name}()"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
