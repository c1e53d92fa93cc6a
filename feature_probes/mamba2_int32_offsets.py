"""Offsets of Mamba-2's Triton kernels: products of 32 bits, which wrap where a tensor reaches over 2**31 elements.

A program of a kernel adds `pid_b * stride_batch + pid_c * chunk_size * stride_seqlen + ...` to its pointers. Program ids have
32 bits, and so has every stride that fits into them: what reaches further comes out negative, without an error.

    2.0.1 to 2.3.2.post1, main           no kernel widens a product: BROKEN
    2.0.0                                imports what is not there, and was not read: UNRECOGNISED
    up to 1.2.2                          no Mamba-2: ABSENT

No tree has a repair. The kernels are in five modules, and the host code in one of them; the gated norm, which reads the same wide
projections, has one of its own. The seams run all of that, so every statement of it must be one that was read. A module
that knows `int64` and was not read looks repaired.

Source: https://github.com/state-spaces/mamba/issues/1015
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.feature_probes.definitions import words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

_PACKAGE = "mamba_ssm.ops.triton"
FORWARD, BACKWARD = "_mamba_chunk_scan_combined_fwd", "_mamba_chunk_scan_combined_bwd"
NORM_FORWARD, NORM_BACKWARD = "_layer_norm_fwd", "_layer_norm_bwd"
SCAN = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.ssd_combined", symbol=FORWARD)
NORM = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.layernorm_gated", symbol=NORM_FORWARD)
NARROW = "products-of-32-bits"
WIDE = "int64"

_STEPS = tuple(f"{_PACKAGE}.ssd_{name}" for name in ("chunk_state", "chunk_scan", "bmm", "state_passing"))
_KNOWN: Mapping[str, Mapping[str, str]] = {
    SCAN.module: {
        "41eba27621fa1076": "5d323b616f8dbbdf",
        "f38ad01ddc715aca": "1b235702c590b0fd",
        "b2fc3f1c06763878": "f38d5ad961e34dcc",
        "77ee65e0e8a6caa4": "006c93825de84ac9",
        "f43bf3f6ea783150": "3717ba118605d9a5",
        "1b27da90c9f08129": "0d7e7bc70682261a",
        "3e44ed1aa0cdc835": "868540ba0c45e86a",
        "9f92d2ca1349779d": "39c19c1e4c8e3698",
        "1f5cd859fb65c927": "0b7c4cfa9e994278",
    },
    _STEPS[0]: {
        "1622aa6095683f53": "af740d3780b17789",
        "3018442a409c826b": "714742d2d884f0ea",
        "c9c9b4056b4d041d": "e691baf72e300de6",
        "f86df7af0dd0027f": "c970c25ffcb5de3f",
        "fc41e90a99d57908": "099d174e2125d8ae",
        "1e3c1499c80a8164": "dff766d79026e520",
        "62f90583f7722586": "6d82771b2f62a7bf",
    },
    _STEPS[1]: {
        "4852966dc3492e0a": "7960a61e0426a460",
        "df46011e1ba98e5d": "89024564abed0c85",
        "b147944ee4576e0e": "97349ae83e670029",
        "ab833b052b8d93f7": "7682388cedb83e62",
        "dc4089d00cf0c6cc": "3c4537d6ade7bf7d",
        "9bb68c93c8798c61": "055b5ce4cb0f30c8",
    },
    _STEPS[2]: {"6ef973202f9e9fd4": "2db3c55dd50ac8be", "d4c5ea51fc84abb4": "5059b16f8fa269cd"},
    _STEPS[3]: {"f16baf149b33373f": "615dc8c5a781db2b", "2bc418cf629b7e4e": "ae1fab6c680cb531"},
    NORM.module: {"bfb16073d79bead4": "eb6252e247b90f1c"},
}
"""What was read of each module: its fingerprint, and the hash of a text that has it, for to parse all of them takes 0.3 s."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe_scan(tree: SourceTree) -> Finding:
    """Return whether the kernels of the chunked scan add offsets of 32 bits."""
    return _probe(tree, SCAN, (SCAN.module, *_STEPS), BACKWARD)


def probe_norm(tree: SourceTree) -> Finding:
    """Return whether those of the gated norm do."""
    return _probe(tree, NORM, (NORM.module,), NORM_BACKWARD)


def _probe(tree: SourceTree, target: Target, modules: tuple[str, ...], backward: str) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    strange = [name for name in modules if not _read(tree, name)]
    if not strange:
        seen = "no product of a program's number and a stride has more than 32 bits"
        return broken(NARROW, cpp_source.at(source, f"def {target.symbol}(", seen))
    function = source.function(target.symbol)
    if function is None:
        if source.function(backward) is None and target.symbol not in source.text:
            return absent(f"defines no {target.symbol}", source)
        raise unknown(source, None, f"there is no {target.symbol} that is defined here")
    found = [each for name in strange if (each := tree.module(name)) is not None]
    if any(WIDE in words(each.syntax) for each in found):
        seen = f"{', '.join(each.name for each in found)} know {WIDE}"
        return judged(tree, _REPAIRED, at(source, function, seen), places=[f"{name}:" for name in modules])
    said = ", ".join(f"{name} {meaning(tree, f'{name}:')}" for name in strange)
    raise unknown(source, function, f"nobody read {said}")


def _read(tree: SourceTree, name: str) -> bool:
    """Return whether a module is one that was read: by its text, or else by what it means."""
    source = tree.module(name)
    if source is None:
        return False
    return source.sha256[:16] in _KNOWN[name].values() or meaning(tree, f"{name}:") in _KNOWN[name]
