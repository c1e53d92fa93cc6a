"""The dispatcher of Megatron's fused linear cross entropy, and which GPUs it knows.

`Platform.__init__` compares the major compute capability of the current device with numbers, takes the entry of that
branch, and raises `ValueError: Unsupported architecture` for any other. What was seen:

    blackwell-only            10 alone: dev since 2025-12-05, core_dev_r0.16.0, the tags 26.04-alpha.rc1 and rc2
    blackwell-and-hopper      10, and 9 with an entry of upstream's own: the head of pull request 3345
    blackwell-only-at-import  10 alone, and asked while the module is imported: the heads of pull requests 2206, 2216
    ABSENT                    every release and main; pull request 4312 has another module under that name
    FIXED                     nothing yet: 8, 9 and 12 have branches that were read; others look repaired

The seam hands out an entry with the contract of upstream's own, so that contract is read as well: what the autograd
function passes to an entry and takes from it, and the parameters of the Blackwell entry.
"""

from __future__ import annotations

import ast
from typing import cast

from megacpp_overlays.feature_probes.definitions import binders, statements, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_known
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import is_docstring
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree, parameters

TARGET = Target(
    distribution="megatron-core",
    module="megatron.core.fusions.fused_linear_cross_entropy",
    symbol="Platform",
)
GETTER = "_get_platform"
FUNCTION = "LinearCrossEntropy"
ENTRIES = "megatron.core.fusions.linear_cross_entropy"
_BLACKWELL = f"{ENTRIES}.blackwell.entry"

BLACKWELL_ONLY = "blackwell-only"
BLACKWELL_AND_HOPPER = "blackwell-and-hopper"
AT_IMPORT = "blackwell-only-at-import"

SERVED = frozenset({8, 9, 12})
"""Major compute capabilities that the portable entry serves: those for which all its parts are made."""
_SHAPES = {frozenset({10}): BLACKWELL_ONLY, frozenset({9, 10}): BLACKWELL_AND_HOPPER}
_REPAIRED: Repairs = {}
"""No tree with branches for all of them was read yet."""

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

KNOWN = {
    FUNCTION: {
        "9202afcce6a9fd04": "dev 1f08cebac2 (2025-12-05) to d48bd6be0a, core_dev_r0.16.0, 26.04-alpha",
        "b98def5ca4bb3077": "our stand-ins",
    },
    "linear_cross_entropy": {
        "5d294179b92c4cad": "dev 1f08cebac2 (2025-12-05) to d48bd6be0a, core_dev_r0.16.0, 26.04-alpha",
        "8327d8fa288e7452": "our stand-ins",
    },
}
"""Bodies between a caller and an entry. What they do with numbers is a part of the contract: who divides, and by what."""
_KNOWN_ENTRY = {
    "forward": {
        "38cfb1a72fe2f3ee": "dev 1f08cebac2 (2025-12-05) to d48bd6be0a, core_dev_r0.16.0, 26.04-alpha",
        "1e12b88e109ff275": "our stand-ins",
    },
    "backward": {
        "c77eae2d00bb16a8": "dev 1f08cebac2 (2025-12-05), core_dev_r0.16.0",
        "2ed1ad4df30560c7": "dev 13ad653790 (2026-02-03) to d48bd6be0a, 26.04-alpha",
        "73124bc3a9193904": "our stand-ins",
    },
}
"""Bodies of the entry for Blackwell, for which the portable one stands in."""

_MADE_BEFORE = (Pattern("if getattr(self, $$what): return"), Pattern("if hasattr(self, $$what): return"))
_CAPABILITY = Pattern("$name = $device.get_device_capability($$which)")
_ONE_MAJOR, _MAJORS = Pattern("$capability[0] == $major"), Pattern("$capability[0] in $majors")
_REFUSAL = Pattern("raise ValueError($$why)")
_BUILT = Pattern(f"{TARGET.symbol}()")
_KEPT = Pattern(f"$name = {TARGET.symbol}()")
_GIVEN_OUT = Pattern(f"return {TARGET.symbol}()")
_GETTER_USED = Pattern(GETTER)
_ENTRY_CALLED = {
    name: Pattern(f"$taken = {GETTER}().{attribute}($$passed)") for name, attribute in _ENTRY_ATTRIBUTES.items()
}


def probe(tree: SourceTree) -> Finding:
    """Return which major compute capabilities the dispatcher has no branch for.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/2256 (dev) and /pull/3345 (a branch for 9).
    """
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if TARGET.symbol not in words(source.syntax) and source.find(TARGET.symbol) is None:
        return absent(f"defines no {TARGET.symbol}", source)
    branches, refusal = _dispatch(source, _constructor(source))
    majors = frozenset(branches)
    known = ", ".join(map(str, sorted(majors)))
    seen = at(source, refusal, f"the dispatcher knows compute capability {known} and refuses any other")
    if majors >= SERVED:
        entries = [f"{ENTRIES}.{package}.entry:" for package in sorted(set(branches.values()))]
        places = [f"{TARGET.module}:{name}" for name in (TARGET.symbol, GETTER, FUNCTION)]
        return judged(tree, _REPAIRED, seen, places=[*places, *entries])
    if (shape := _SHAPES.get(majors)) is None:
        raise unknown(source, refusal, f"no known dispatcher has branches for {known} alone")
    if shape == BLACKWELL_ONLY and not source.bindings.of(GETTER) and any(map(_KEPT.match, source.syntax.body)):
        return broken(AT_IMPORT, seen, Evidence(seen="it is asked while the module is imported"))
    for name in (TARGET.symbol, GETTER, FUNCTION):
        _check_bound_once(source, name)
    _check_getter(source)
    _check_autograd_function(source)
    for package in sorted(set(branches.values())):
        _check_entry(source, tree, f"{ENTRIES}.{package}.entry")
    return broken(shape, seen)


def _check_bound_once(source: ModuleSource, name: str) -> None:
    """Raise where a module gives a name another value, or changes what it names from outside."""
    if others := [node for node in source.bindings.anywhere(name) if node not in source.bindings.definitions(name)]:
        raise unknown(source, others[0], f"{name} is changed outside its definition")


def _constructor(source: ModuleSource) -> FunctionNode:
    found = source.bindings.definitions(TARGET.symbol)
    match found:
        case [ast.ClassDef(bases=[], keywords=[], decorator_list=[]) as cls] if cls in source.syntax.body:
            methods = {node.name: node for node in cls.body if isinstance(node, FunctionNode)}
        case _:
            raise unknown(source, found[0] if found else None, f"{TARGET.symbol} is no plain class of this module")
    if sorted(node.name for node in cls.body if isinstance(node, FunctionNode)) != ["__init__", "__new__"]:
        raise unknown(source, cls, f"{TARGET.symbol} has other methods than __new__ and __init__")
    init = methods["__init__"]
    if parameters(init) != ("self",) or init.decorator_list:
        raise unknown(source, init, f"{TARGET.symbol}.__init__ takes parameters or is decorated")
    return init


def _dispatch(source: ModuleSource, init: FunctionNode) -> tuple[dict[int, str], ast.stmt]:
    """Return the package of the entry by major capability, and the refusal of every other."""
    capability = _capability(source, init)
    asking = [node for node in init.body if isinstance(node, ast.If)]
    rest: list[ast.stmt] = [node for node in asking if not any(pattern.match(node) for pattern in _MADE_BEFORE)]
    if len(rest) != 1:
        raise unknown(source, init, f"{TARGET.symbol}.__init__ has {len(rest)} comparisons of the capability")
    start, branches = rest[0], dict[int, str]()
    while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
        if not (majors := _majors(branch.test, capability)):
            raise unknown(source, branch, f"a branch asks what is not known: {ast.unparse(branch.test)}")
        branches |= dict.fromkeys(majors, _imported_entry(source, branch))
        rest = branch.orelse
    if not _REFUSAL.match(rest):
        raise unknown(source, start, "other capabilities do not end in a ValueError")
    stored = [node for node in ast.walk(init) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    kept = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    if kept != {*_ENTRY_ATTRIBUTES.values(), "_initialized"}:
        raise unknown(source, init, f"{TARGET.symbol} keeps {', '.join(sorted(kept)) or 'nothing'}")
    return branches, rest[0]


def _capability(source: ModuleSource, init: FunctionNode) -> str:
    """Return the one name that holds the compute capability; everything else at its level must be known, too."""
    for statement in init.body:
        if not isinstance(statement, ast.If | ast.Assert | ast.Assign | ast.AnnAssign) and not is_docstring(statement):
            raise unknown(source, statement, f"{TARGET.symbol}.__init__ has a statement of an unknown kind")
    names = [found.text("name") for found in map(_CAPABILITY.match, init.body) if found]
    if len(names) != 1 or len(binders(init, names[0])) != 1:
        raise unknown(source, init, f"{TARGET.symbol}.__init__ does not ask once for the compute capability")
    return names[0]


def _majors(test: ast.expr, capability: str) -> list[int]:
    """Return the numbers in `capability[0] == 9` or `capability[0] in (8, 9)`; nothing for any other test."""
    if one := _ONE_MAJOR.match(test):
        found, numbers = one, [one["major"]]
    elif several := _MAJORS.match(test):
        found, numbers = several, getattr(several["majors"], "elts", [])
    else:
        return []
    values = [node.value if isinstance(node, ast.Constant) else None for node in numbers]
    is_known = found.text("capability") == capability and all(isinstance(value, int) for value in values)
    return cast("list[int]", values) if is_known else []


def _imported_entry(source: ModuleSource, branch: ast.If) -> str:
    """Return the package whose `entry` a branch imports: `blackwell`."""
    found = [node for statement in branch.body for node in ast.walk(statement) if isinstance(node, ast.ImportFrom)]
    match found:
        case [ast.ImportFrom(module=str(module), level=level, names=[ast.alias(name="entry")])]:
            full = {0: module, 1: f"{ENTRIES.rpartition('.')[0]}.{module}"}.get(level, "")
            parent, _, package = full.rpartition(".")
            if parent == ENTRIES:
                return package
    raise unknown(source, branch, f"a branch does not import one entry of {ENTRIES}")


def _check_getter(source: ModuleSource) -> None:
    getter = source.function(GETTER)
    if getter is None or getter not in source.syntax.body or parameters(getter):
        raise unknown(source, getter, f"there is no function {GETTER} without parameters")
    cached = [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in getter.decorator_list]
    if cached not in (["lru_cache"], ["cache"]) or not _GIVEN_OUT.match(statements(getter.body)):
        raise unknown(source, getter, f"{GETTER} does more than keep one {TARGET.symbol}")
    if len(built := list(_BUILT.find(source.syntax))) != 1:
        raise unknown(source, built[-1].node if built else getter, f"{TARGET.symbol} is built in {len(built)} places")


def _check_autograd_function(source: ModuleSource) -> None:
    """Raise unless the autograd function passes what an entry takes, and takes what it returns."""
    forward, backward = source.function(f"{FUNCTION}.forward"), source.function(f"{FUNCTION}.backward")
    if forward is None or backward is None or parameters(forward) != ("ctx", *FORWARD):
        raise unknown(source, forward, f"{FUNCTION} does not take what is known")
    for function, arguments, values in ((forward, FORWARD, FORWARD_VALUES), (backward, BACKWARD, BACKWARD_VALUES)):
        calls = list(_ENTRY_CALLED[function.name].find(function))
        taken = getattr(calls[0]["taken"], "elts", ()) if len(calls) == 1 else ()
        passed = [ast.unparse(argument).lstrip("_") for call in calls for argument in call.many("passed")]
        if len(taken) != values or passed != [*arguments]:
            attribute = _ENTRY_ATTRIBUTES[function.name]
            raise unknown(
                source, function, f"{FUNCTION} does not pass {attribute} what is known, or takes other values"
            )
    if (uses := len(list(_GETTER_USED.find(source.syntax)))) != len(_ENTRY_CALLED):
        raise unknown(source, None, f"{GETTER} is used in {uses} places")
    for symbol, bodies in KNOWN.items():
        check_known(source, symbol, bodies)


def _check_entry(source: ModuleSource, tree: SourceTree, name: str) -> None:
    entry = tree.module(name)
    if entry is None:
        raise unknown(source, None, f"there is no module {name}")
    for function, expected in (("forward", FORWARD), ("backward", BACKWARD)):
        node = entry.function(function)
        if node is None or parameters(node) != expected:
            raise unknown(entry, node, f"{name}.{function} does not take what is known")
        if name == _BLACKWELL:
            check_known(entry, function, _KNOWN_ENTRY[function])
