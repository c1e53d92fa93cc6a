"""Validations of DSA that read device values from the host on the way of a captured forward pass.

They lie in three modules:

    dsa_layout    position ids are compared with `torch.equal`, on CUDA too (PR 3674 head, main 2026-06-25)
    dsa_masking   so are masks and key positions; a mask that fails is no error: it declines the fused indexer (same)
    dsa           the context-parallel length check reads what it gathered (PR 3674 head, main, dev, 0.19.x)
                  and, in the single file of spring 2026, the two above

While a stream is captured the seams answer for upstream: what its mask builder returns counts as contiguous, and its
bounds are computed without its comparisons. So every function that this leans on must be one that was read, down to the
helpers; an edit in any of them ends in UNRECOGNISED. These shapes are history and change no more. FIXED, too, is said of
known bodies only: which code reads from the host does not show in the names that it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import calls, plain_function
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.host_reads import reads
from megacpp_overlays.feature_probes.known_bodies import known_function
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.patterns import Pattern
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

_REPAIRED_IN = "0.19.0 to 0.19.2, main since d1cab16a01 (2026-07-08), dev since 6888385fc7 (2026-07-28)"
_REPAIRED_POSITIONS_BODY = "371d8166bee53bac"
_REPAIRED_POSITIONS = table((f"{LAYOUT_TARGET.module}:{POSITIONS}",), {_REPAIRED_IN: "566b66b2a496f3d0"})
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
    _REPAIRED_IN: {MASKING_TARGET.module: {BOUNDS: "378727d8af0f4972", "normalize_varlen_bounds": "c773ba8d82528598"}},
}
_REPAIRED_BOUNDS_THERE = table(
    (f"{MASKING_TARGET.module}:{BOUNDS}", f"{MASKING_TARGET.module}:normalize_varlen_bounds"),
    {_REPAIRED_IN: "9c31d05e3a191008 30b40ac101f28f6f"},
)
"""The same with the names that they use."""
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


_FUSED_LOSS = Pattern(f"def {FUSED_LOSS}(q, $$_): $$_")
_DECLINES = Pattern("return None")


def probe_layout(tree: SourceTree) -> Finding:
    """Return whether position ids on the GPU are compared on the host."""
    source = tree.module(LAYOUT_TARGET.module)
    if source is None:
        return absent(f"there is no module {LAYOUT_TARGET.module}")
    if plain_function(source, POSITIONS) is None:
        return absent(f"{source.name} has no {POSITIONS}")
    function = known_function(source, POSITIONS, {_REPAIRED_POSITIONS_BODY, *_EQUAL_POSITIONS})
    if (body := fingerprint(function)) == _REPAIRED_POSITIONS_BODY:
        seen = at(source, function, "rows are compared only where they are not on the GPU")
        return judged(tree, _REPAIRED_POSITIONS, seen)
    return broken(EQUAL_POSITIONS, *_compared(source, function), _as_in(_EQUAL_POSITIONS[body]))


def probe_masking(tree: SourceTree) -> Finding:
    """Return whether masks and key positions are compared on the host.

    Source: https://github.com/NVIDIA/Megatron-LM/pull/5099
    """
    source = tree.module(MASKING_TARGET.module)
    if source is None:
        return absent(f"there is no module {MASKING_TARGET.module}")
    bounds = plain_function(source, BOUNDS)
    if bounds is None:
        return absent(f"{source.name} has no {BOUNDS}")
    form = _form(tree, bounds, {**_REPAIRED_BOUNDS, **_EQUAL_BOUNDS})
    if form in _REPAIRED_BOUNDS:
        return judged(tree, _REPAIRED_BOUNDS_THERE, at(source, bounds, f"{BOUNDS} decides from its arguments"))
    return broken(EQUAL_BOUNDS, *_compared(source, bounds), _as_in(form))


def probe_dsa(tree: SourceTree) -> Finding:
    """Return whether sequence lengths of context-parallel ranks are read on the host, and what a single file adds."""
    source = tree.module(DSA_TARGET.module)
    if source is None:
        return absent(f"there is no module {DSA_TARGET.module}")
    single = {name: plain_function(source, own) for name, own in SINGLE_FILE.items()}
    if plain_function(source, LENGTHS) is None:
        return _single_file(source, tree, single[POSITIONS], single[BOUNDS])
    lengths = known_function(source, LENGTHS, _LENGTHS_BODIES)
    if any(single.values()):
        raise unknown(source, lengths, f"has both {LENGTHS} and functions of the single-file layout")
    seen = [at(source, each, f"the host reads {ast.unparse(each)}") for each in [*reads(lengths)][:3]]
    return broken(READ_LENGTHS, *seen, _as_in(_LENGTHS_BODIES[fingerprint(lengths)]))


def _single_file(
    source: ModuleSource, tree: SourceTree, positions: FunctionNode | None, bounds: FunctionNode | None
) -> Finding:
    if positions is None and bounds is None:
        return absent(f"{source.name} has neither {LENGTHS} nor {SINGLE_FILE[POSITIONS]}")
    if positions is None:
        raise unknown(source, None, f"{SINGLE_FILE[POSITIONS]} is missing")
    known_function(source, positions.name, _SINGLE_POSITIONS)
    if bounds is None:
        if SINGLE_FILE[BOUNDS] in source.text:  # called, imported, or in a text that is executed
            raise unknown(source, None, f"{SINGLE_FILE[BOUNDS]} is spoken of and not defined")
        return broken(SINGLE, *_compared(source, positions), _as_in(_SINGLE_POSITIONS[fingerprint(positions)]))
    form = _form(tree, bounds, _SINGLE_BOUNDS)
    _check_fused_loss(source)
    return broken(SINGLE_FUSED, *_compared(source, positions), *_compared(source, bounds), _as_in(form))


def _form(tree: SourceTree, bounds: FunctionNode, forms: Mapping[str, _Form]) -> str:
    """Return the form that has this body of the bounds, and all of whose functions are as in it."""
    body = fingerprint(bounds)
    for form, modules in forms.items():
        if body not in {known.get(bounds.name) for known in modules.values()}:
            continue
        for module, known in modules.items():
            source = tree.module(module)
            if source is None:
                raise SourceError(f"there is no module {module}")
            for name, known_body in known.items():
                known_function(source, name, {known_body})
        return form
    raise SourceError(f"{bounds.name} has an unknown body {body}")


def _check_fused_loss(source: ModuleSource) -> None:
    """Check that the seam can decline for the fused loss: its first parameter is q, and None is an answer.

    That is all that the seam relies on, so the body may be any. Outside of a capture it runs as it is, whatever it
    repairs on its way; while one is captured it is not run, and the loss is the dense one, which is right and slower.
    """
    loss = plain_function(source, FUSED_LOSS)
    if loss is None:
        raise unknown(source, None, f"{FUSED_LOSS} is missing")
    if _FUSED_LOSS.match(loss) is None:
        raise unknown(source, loss, f"the first parameter of {FUSED_LOSS} is not q")
    if not any(_DECLINES.find(loss)):
        raise unknown(source, loss, f"{FUSED_LOSS} has no way to decline")


def _compared(source: ModuleSource, function: FunctionNode) -> list[Evidence]:
    return [at(source, call, f"the host waits for {ast.unparse(call)}") for call in calls(function, "equal")]


def _as_in(where: str) -> Evidence:
    return Evidence(seen=f"as in {where}")
