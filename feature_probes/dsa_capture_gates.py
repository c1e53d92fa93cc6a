"""Which validations of DSA read device values from the host on the way of a captured forward pass?

Three modules, three questions:

    dsa_layout    are position ids compared with `torch.equal`, on CUDA too? (PR 3674 head, main 2026-06-25)
    dsa_masking   are masks and key positions? A mask that fails is no error: it declines the fused indexer. (same)
    dsa           does the context-parallel length check read what it gathered? (PR 3674 head, main, dev, 0.19.x)
                  and, in the single file of spring 2026, the two questions above

The second question also needs to know that key positions are 0, 1, 2 ... by construction, because while a stream is
captured that can no longer be looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.host_reads import (
    absent,
    at,
    broken,
    called,
    calls,
    fixed,
    plain_function,
    reads,
    signature,
    unrecognised,
)
from megacpp_overlays.fingerprint import fingerprint
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source import FunctionNode, ModuleSource, SourceTree

POSITIONS = "extract_query_positions_from_position_ids"
BOUNDS = "build_fused_indexer_varlen_bounds"
MASK = "build_dsattention_forward_mask"
LENGTHS = "_validate_nonpacked_cp_uniform_length"
FUSED_LOSS = "_fused_qk_topk_lighting_with_streaming_sparse_kl"
"""Spring 2026 only: fused indexer and loss in one; None says that it declines."""
SINGLE_FILE = {name: f"_{name}" for name in (POSITIONS, BOUNDS, MASK)}
"""Names in the single file of spring 2026."""

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
LAYOUT_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_layout", symbol=POSITIONS)
MASKING_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa_masking", symbol=BOUNDS)
DSA_TARGET = Target(distribution="megatron-core", module=f"{_VARIANT}.dsa", symbol=LENGTHS)

EQUAL_POSITIONS = "positions-compared-on-host"
EQUAL_BOUNDS = "masks-compared-on-host"
READ_LENGTHS = "lengths-read-on-host"
SINGLE = "single-file"
SINGLE_FUSED = "single-file-with-fused-indexer"

_POSITIONS_SIGNATURE = "position_ids, sq, device"
_BOUNDS_SIGNATURE = "*, sq, skv, device, mask, varlen_starts, varlen_ends, key_positions"
_MASK_SIGNATURE = (
    "*, sq, skv, b, device, cp_size, cp_rank, cp_comm_type, cp_group, attn_mask_type, attention_mask, position_ids, "
    "packed_seq_params"
)
_LAYOUT_POSITIONS = "get_cp_positions_from_layout"
_LENGTHS_BODIES = {
    "18a622e3ef6140b0": "0.19.0, 0.19.2, main and dev",
    "ad0ce618283ce679": "PR 3674 and main of 2026-06-25",
}
_WITHOUT_HOST = frozenset({"_assert_async", "all_gather_into_tensor", "empty", "full", "get_pg_size", "size"})


def probe_layout(tree: SourceTree) -> Finding:
    """Return whether position ids on the GPU are compared on the host."""
    return _ask(tree, LAYOUT_TARGET, _layout)


def probe_masking(tree: SourceTree) -> Finding:
    """Return whether masks and key positions are compared on the host.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
    """
    return _ask(tree, MASKING_TARGET, lambda source: _masking(source, tree))


def probe_dsa(tree: SourceTree) -> Finding:
    """Return whether sequence lengths of context-parallel ranks are read on the host, and what a single file adds."""
    return _ask(tree, DSA_TARGET, _dsa)


def _ask(tree: SourceTree, target: Target, question: Callable[[ModuleSource], Finding]) -> Finding:
    try:
        source = tree.module(target.module)
        return absent(f"there is no module {target.module}") if source is None else question(source)
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))


def _layout(source: ModuleSource) -> Finding:
    function = plain_function(source, POSITIONS)
    if function is None:
        return absent(f"{source.name} has no {POSITIONS}")
    seen, guarded = _positions(source, function)
    if guarded is None:
        return unrecognised(seen)
    return fixed(seen) if guarded else broken(EQUAL_POSITIONS, seen)


def _masking(source: ModuleSource, tree: SourceTree) -> Finding:
    bounds, mask = plain_function(source, BOUNDS), plain_function(source, MASK)
    if bounds is None:
        return absent(f"{source.name} has no {BOUNDS}")
    if not any(reads(bounds)):
        return fixed(at(source, bounds, f"{BOUNDS} decides from its arguments and compares no tensor"))
    layout = tree.module(LAYOUT_TARGET.module)
    places = None if layout is None else plain_function(layout, _LAYOUT_POSITIONS)
    if layout is None or mask is None or places is None:
        return unrecognised(at(source, bounds, f"{MASK} or {_LAYOUT_POSITIONS} is missing"))
    if surprise := next(iter(_strange_bounds(source, bounds, mask, layout, places)), None):
        return unrecognised(surprise)
    return broken(EQUAL_BOUNDS, *_comparisons(source, bounds))


def _dsa(source: ModuleSource) -> Finding:
    lengths = plain_function(source, LENGTHS)
    single = {name: plain_function(source, own) for name, own in SINGLE_FILE.items()}
    if lengths is None:
        return _single_file(source, single)
    if any(single.values()):
        return unrecognised(at(source, lengths, f"has both {LENGTHS} and functions of the single-file layout"))
    found = list(reads(lengths))
    if (body := fingerprint(lengths)) in _LENGTHS_BODIES:
        seen = [at(source, each, f"the host reads {ast.unparse(each)}") for each in found[:3]]
        return broken(READ_LENGTHS, *seen, Evidence(seen=f"as in {_LENGTHS_BODIES[body]}"))
    if not found and {called(call) for call in calls(lengths)} & _WITHOUT_HOST:
        return fixed(at(source, lengths, f"{LENGTHS} reads nothing that it gathered"))
    return unrecognised(at(source, lengths, f"{LENGTHS} has an unknown body {body}"))


def _single_file(source: ModuleSource, single: dict[str, FunctionNode | None]) -> Finding:
    positions, bounds, mask = (single[name] for name in (POSITIONS, BOUNDS, MASK))
    if positions is None and bounds is None:
        return absent(f"{source.name} has neither {LENGTHS} nor {SINGLE_FILE[POSITIONS]}")
    if positions is None:
        return unrecognised(Evidence(seen=f"{SINGLE_FILE[POSITIONS]} is missing", file=source.path))
    seen, guarded = _positions(source, positions)
    if guarded is not False:
        return unrecognised(seen)
    if bounds is None:
        return broken(SINGLE, seen)
    places = plain_function(source, f"_{_LAYOUT_POSITIONS}")
    loss = plain_function(source, FUSED_LOSS)
    if mask is None or places is None or loss is None:
        return unrecognised(at(source, bounds, f"{SINGLE_FILE[MASK]}, _{_LAYOUT_POSITIONS} or {FUSED_LOSS} is missing"))
    if not any(isinstance(node, ast.Return) and _is_none(node.value) for node in ast.walk(loss)):
        return unrecognised(at(source, loss, f"{FUSED_LOSS} has no way to decline"))
    if surprise := next(iter(_strange_bounds(source, bounds, mask, source, places)), None):
        return unrecognised(surprise)
    return broken(SINGLE_FUSED, seen, *_comparisons(source, bounds))


def _positions(source: ModuleSource, function: FunctionNode) -> tuple[Evidence, bool | None]:
    """Return what compares the first row with the last, and whether it is kept off the GPU; None when not known."""
    if signature(function) != _POSITIONS_SIGNATURE:
        return at(source, function, f"the parameters of {function.name} are not ({_POSITIONS_SIGNATURE})"), None
    found = list(reads(function))
    guards = [node for node in ast.walk(function) if isinstance(node, ast.If) and _asserts(node, found)]
    if len(found) != 1 or len(guards) != 1:
        return at(source, function, f"{function.name} does not have the one comparison that is known"), None
    seen = f"the host waits for {ast.unparse(found[0])}"
    match ast.unparse(guards[0].test):
        case "position_ids.size(0) > 1":
            return at(source, found[0], seen), False
        case "position_ids.size(0) > 1 and (not position_ids.is_cuda)":
            return at(source, guards[0], "rows are compared only where they are not on the GPU"), True
        case other:
            return at(source, guards[0], f"compares rows if {other}"), None


def _asserts(branch: ast.If, found: list[ast.Call]) -> bool:
    """Return whether a branch does nothing but assert the known comparison."""
    known = {"torch.equal(position_ids[0], position_ids[-1])"}
    match branch:
        case ast.If(body=[ast.Assert(test=ast.Call() as test)], orelse=[]):
            return test in found and ast.unparse(test) in known
    return False


def _strange_bounds(
    source: ModuleSource, bounds: FunctionNode, mask: FunctionNode, layout: ModuleSource, places: FunctionNode
) -> Iterator[Evidence]:
    """Yield what the seams cannot rely on: how a comparison declines, and where key positions come from."""
    if signature(bounds) != _BOUNDS_SIGNATURE:
        yield at(source, bounds, f"the parameters of {bounds.name} are not ({_BOUNDS_SIGNATURE})")
    if signature(mask) not in {_MASK_SIGNATURE, f"{_MASK_SIGNATURE}, packed_query_positions=None"}:
        yield at(source, mask, f"the parameters of {mask.name} are not as known")
    declining = {id(node) for node in ast.walk(bounds) if _declines(node)}
    if not len(calls(bounds, "equal")) == len(list(reads(bounds))) == len(declining) == 3:
        yield at(source, bounds, f"{bounds.name} has not the three comparisons that decline")
    if any(reads(mask)):
        yield at(source, mask, f"{mask.name} reads from the host itself")
    for where, function in ((source, mask), (layout, places)):
        for node in _other_key_positions(function):
            yield at(where, node, f"key positions may be {ast.unparse(node)}, not 0, 1, 2 ...")


def _comparisons(source: ModuleSource, function: FunctionNode) -> Iterator[Evidence]:
    return (at(source, call, f"the host waits for {ast.unparse(call)}") for call in calls(function, "equal"))


def _declines(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call), body=[ast.Return(value=value)]):
            return called(call) == "equal" and _is_none(value)
    return False


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _other_key_positions(function: FunctionNode) -> Iterator[ast.expr]:
    """Yield what may be taken for key positions beside `torch.arange(skv, ...)` and what the layout gives.

    Key positions are the last in what is returned, and the last argument of the mask from positions.
    """
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    within = [node for value in returned for node in ast.walk(value)]
    last = [node.elts[-1] for node in within if isinstance(node, ast.Tuple)]
    last += [node.args[-1] for node in within if isinstance(node, ast.Call) and "from_positions" in called(node)]
    names = {each.id for each in last if isinstance(each, ast.Name)}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                if not ast.unparse(value).startswith("torch.arange(skv, "):
                    yield value
            case ast.Assign(targets=[ast.Tuple(elts=[*_, ast.Name(id=name)])], value=value) if name in names:
                if not (isinstance(value, ast.Call) and called(value).lstrip("_") == _LAYOUT_POSITIONS):
                    yield value
