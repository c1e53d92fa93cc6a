"""Which validations of DSA read device values from the host on the way of a captured forward pass?

Three modules, three questions:

    dsa_layout    are position ids compared with `torch.equal`, on CUDA too? (PR 3674 head, main 2026-06-25)
    dsa_masking   are masks and key positions? A mask that fails is no error: it declines the fused indexer. (same)
    dsa           does the context-parallel length check read what it gathered? (PR 3674 head, main, dev, 0.19.x)
                  and, in the single file of spring 2026, the two questions above

While a stream is captured the seams answer for upstream: what its mask builder returns counts as contiguous, and its
bounds are computed without its comparisons. So every function that this leans on must be one that was read, down to the
helpers; an edit in any of them ends in UNRECOGNISED. These shapes are history and change no more. FIXED, too, is said of
known bodies only: which code reads from the host does not show in the names that it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unrecognised
from megacpp_overlays.feature_probes.host_reads import reads
from megacpp_overlays.feature_probes.known_bodies import unfamiliar
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

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

_REPAIRED_POSITIONS = {"371d8166bee53bac": "0.19.0, 0.19.2, main, dev and main of 2026-07-08"}
_EQUAL_POSITIONS = {
    "e9c299d1006ae642": "PR 3674 and main of 2026-06-25",
    "d553a92e404114ba": "our stand-in of June 2026",
}
_SINGLE_POSITIONS = {
    "b947695a8dbab97d": "the stored files of spring 2026",
    "77cc9be855bce46c": "our stand-in of spring 2026",
}
_LENGTHS_BODIES = {
    "18a622e3ef6140b0": "0.19.0, 0.19.2, main, dev and main of 2026-07-08",
    "ad0ce618283ce679": "PR 3674 and main of 2026-06-25",
}

# Forms: functions by module, all of which must have the known body. Our stand-ins are forms like any other, because
# tests and reproducers load them where no release has the shape.
_Form = Mapping[str, Mapping[str, str]]

_REPAIRED_BOUNDS: Mapping[str, _Form] = {
    "0.19.0, 0.19.2, main, dev and main of 2026-07-08": {
        MASKING_TARGET.module: {BOUNDS: "378727d8af0f4972", "normalize_varlen_bounds": "c773ba8d82528598"}
    },
}
_EQUAL_BOUNDS: Mapping[str, _Form] = {
    "PR 3674 and main of 2026-06-25": {
        MASKING_TARGET.module: {
            BOUNDS: "33412c150ac96f06",
            MASK: "4a5e28c7745cbdfa",
            "normalize_varlen_bounds": "c773ba8d82528598",
            "_build_default_causal_mask": "ffbefe26ba412ecb",
            "build_causal_mask_from_positions": "f149ade81d0e9c27",
            "generate_varlen_mask_params_for_positions": "a26d94c5aa7fb368",
        },
        LAYOUT_TARGET.module: {
            POSITIONS: "e9c299d1006ae642",
            "get_cp_positions_from_layout": "fe4c1f4091af7f81",
            "build_zigzag_cp_local_positions": "013c78bd00feb9c6",
            "normalize_cp_comm_type": "62e0706d001e1dab",
            "get_packed_qk_cu_seqlens": "256e7ad9d8e1f1d8",
        },
    },
    "our stand-in of June 2026": {
        MASKING_TARGET.module: {
            BOUNDS: "b2a221bdb3e4d091",
            MASK: "94e498ff6686618f",
            "build_causal_mask_from_positions": "f6991ffc794edcff",
        },
        LAYOUT_TARGET.module: {
            POSITIONS: "d553a92e404114ba",
            "get_cp_positions_from_layout": "3fab5dfbc74ccf16",
        },
    },
}
_SINGLE_BOUNDS: Mapping[str, _Form] = {
    "a stored file of spring 2026": {
        DSA_TARGET.module: {
            SINGLE_FILE[BOUNDS]: "86a477ae5cbaeabb",
            SINGLE_FILE[MASK]: "8278836d761b7c49",
            SINGLE_FILE[POSITIONS]: "b947695a8dbab97d",
            "_build_default_causal_mask": "ffbefe26ba412ecb",
            "_build_causal_mask_from_positions": "921f419a7fc5a385",
            "_generate_varlen_mask_params": "1fe9f73914f1fdeb",
            "_get_packed_qk_cu_seqlens": "ed3a642a8b53732d",
            "_get_cp_positions_from_layout": "f0725cda4e60ceb3",
            "_normalize_cp_comm_type": "76449f94062cd18e",
        },
    },
    "our stand-in of spring 2026": {
        DSA_TARGET.module: {
            SINGLE_FILE[BOUNDS]: "f7d7fd6ff41c21cb",
            SINGLE_FILE[MASK]: "6f5f621f5df188bd",
            SINGLE_FILE[POSITIONS]: "77cc9be855bce46c",
            "_build_causal_mask_from_positions": "7a8a86abc0db6a68",
            "_get_cp_positions_from_layout": "c37d810904e6ba11",
        },
    },
}


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
    return _ask(tree, DSA_TARGET, lambda source: _dsa(source, tree))


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
    if (body := fingerprint(function)) in _REPAIRED_POSITIONS:
        seen = f"rows are compared only where they are not on the GPU, as in {_REPAIRED_POSITIONS[body]}"
        return fixed(at(source, function, seen))
    if body in _EQUAL_POSITIONS:
        return broken(EQUAL_POSITIONS, *_compared(source, function), _as_in(_EQUAL_POSITIONS[body]))
    return unrecognised(at(source, function, f"{POSITIONS} has an unknown body {body}"))


def _masking(source: ModuleSource, tree: SourceTree) -> Finding:
    bounds = plain_function(source, BOUNDS)
    if bounds is None:
        return absent(f"{source.name} has no {BOUNDS}")
    name, surprise = _form(tree, bounds, {**_REPAIRED_BOUNDS, **_EQUAL_BOUNDS})
    if name in _REPAIRED_BOUNDS:
        return fixed(at(source, bounds, f"{BOUNDS} decides from its arguments, as in {name}"))
    if surprise is not None:
        return unrecognised(surprise)
    return broken(EQUAL_BOUNDS, *_compared(source, bounds), _as_in(name))


def _dsa(source: ModuleSource, tree: SourceTree) -> Finding:
    lengths = plain_function(source, LENGTHS)
    single = {name: plain_function(source, own) for name, own in SINGLE_FILE.items()}
    if lengths is None:
        return _single_file(source, tree, single[POSITIONS], single[BOUNDS])
    if any(single.values()):
        return unrecognised(at(source, lengths, f"has both {LENGTHS} and functions of the single-file layout"))
    if (body := fingerprint(lengths)) not in _LENGTHS_BODIES:
        return unrecognised(at(source, lengths, f"{LENGTHS} has an unknown body {body}"))
    seen = [at(source, each, f"the host reads {ast.unparse(each)}") for each in [*reads(lengths)][:3]]
    return broken(READ_LENGTHS, *seen, _as_in(_LENGTHS_BODIES[body]))


def _single_file(
    source: ModuleSource, tree: SourceTree, positions: FunctionNode | None, bounds: FunctionNode | None
) -> Finding:
    if positions is None and bounds is None:
        return absent(f"{source.name} has neither {LENGTHS} nor {SINGLE_FILE[POSITIONS]}")
    if positions is None:
        return unrecognised(Evidence(seen=f"{SINGLE_FILE[POSITIONS]} is missing", file=source.path))
    if (body := fingerprint(positions)) not in _SINGLE_POSITIONS:
        return unrecognised(at(source, positions, f"{positions.name} has an unknown body {body}"))
    if bounds is None:
        return broken(SINGLE, *_compared(source, positions), _as_in(_SINGLE_POSITIONS[body]))
    name, surprise = _form(tree, bounds, _SINGLE_BOUNDS)
    if surprise is not None:
        return unrecognised(surprise)
    if (problem := _strange_loss(source)) is not None:
        return unrecognised(problem)
    return broken(SINGLE_FUSED, *_compared(source, positions), *_compared(source, bounds), _as_in(name))


def _form(tree: SourceTree, bounds: FunctionNode, forms: Mapping[str, _Form]) -> tuple[str, Evidence | None]:
    """Return the form that has this body of the bounds, and the first function that is not as in it."""
    body = fingerprint(bounds)
    for name, modules in forms.items():
        if body not in {known.get(bounds.name) for known in modules.values()}:
            continue
        for module, known in modules.items():
            source = tree.module(module)
            if source is None:
                return "", Evidence(seen=f"there is no module {module}")
            if (surprise := unfamiliar(source, known)) is not None:
                return "", surprise
        return name, None
    return "", Evidence(seen=f"{bounds.name} has an unknown body {body}")


def _strange_loss(source: ModuleSource) -> Evidence | None:
    """Return what keeps the seam from declining for the fused loss: another first parameter, or no answer of None."""
    loss = plain_function(source, FUSED_LOSS)
    if loss is None:
        return Evidence(seen=f"{FUSED_LOSS} is missing", file=source.path)
    if loss.args.posonlyargs or [each.arg for each in loss.args.args[:1]] != ["q"]:
        return at(source, loss, f"the first parameter of {FUSED_LOSS} is not q")
    if not any(isinstance(node, ast.Return) and _is_none(node.value) for node in ast.walk(loss)):
        return at(source, loss, f"{FUSED_LOSS} has no way to decline")
    return None


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _compared(source: ModuleSource, function: FunctionNode) -> list[Evidence]:
    return [at(source, call, f"the host waits for {ast.unparse(call)}") for call in calls(function, "equal")]


def _as_in(where: str) -> Evidence:
    return Evidence(seen=f"as in {where}")
