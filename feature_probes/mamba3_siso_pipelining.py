"""The tuner of the Mamba-3 SISO forward kernel, and how many stages it may choose on Blackwell.

On compute capability 10 and 12, more than one stage of software pipelining corrupts the output of this recurrent kernel
without an error (state-spaces/mamba#997, seen there with Triton 3.5.1 to 3.7.0). 2.3.2.post1 lets the tuner choose
among one, two and three; main drops all but one on those devices since 2026-07-23.
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unknown
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Body, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

TARGET = Target(
    distribution="mamba-ssm",
    module="mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd",
    symbol="mamba3_siso_fwd_kernel",
)
ANY_STAGES = "any-number-of-stages"

_KERNELS = {"e6f95f7899876a6a": "2.3.2.post1"}
"""The kernel with its decorators: the configurations that its tuner has, and the loops that they are for."""
_WHOLE = {"68d8d0dba0e3913f": "2.3.2.post1"}
"""The same by the text of the whole module: a gate is read at start-up, and parsing it takes 50 ms."""
_PRUNE = "_prune_mamba3_siso_fwd_configs"
_REPAIRED = table(
    (f"{TARGET.module}:{_PRUNE}", f"{TARGET.module}:{TARGET.symbol}"),
    {"main e9594ce (2026-07-23)": "50e9825c164a4fe7 3f072402008c2afd"},
)
"""What drops configurations, and the kernel with its decorators."""
_WHOLE_REPAIRED = {"bfcf75d9192e0f90": "main e9594ce (2026-07-23)"}
_PRUNED = Pattern("{'early_config_prune': $prune}")
_MAJOR, _STAGES = Pattern("major in (10, 12)"), Pattern("config.num_stages == 1")


def probe(tree: SourceTree) -> Finding:
    """Return whether the tuner is kept from more than one stage."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    if (text := source.sha256[:16]) in _WHOLE:
        seen = f"configurations as in {_WHOLE[text]}"
        return broken(ANY_STAGES, cpp_source.at(source, f"def {TARGET.symbol}(", seen))
    if text in _WHOLE_REPAIRED:
        seen = f"keeps one stage on compute capability 10 and 12, as in {_WHOLE_REPAIRED[text]}"
        repair = [Body(TARGET.module, _PRUNE), Body(TARGET.module, TARGET.symbol)]
        return fixed(cpp_source.at(source, f"def {_PRUNE}(", seen), repair=repair)
    kernel = source.function(TARGET.symbol)
    if kernel is None:
        return absent(f"{TARGET.module} has no {TARGET.symbol}")
    for change in source.bindings.changes(TARGET.symbol):
        raise unknown(source, change, f"{TARGET.symbol} is changed behind its definition")
    if (seen := fingerprint(kernel)) in _KERNELS:
        return broken(ANY_STAGES, at(source, kernel, f"configurations as in {_KERNELS[seen]}"))
    if (prune := _pruning(source, kernel)) is not None:
        one_stage = at(source, prune, f"{prune.name} keeps one stage on compute capability 10 and 12")
        return judged(tree, _REPAIRED, one_stage, places=(f"{source.name}:{prune.name}",))
    raise unknown(source, kernel, f"{TARGET.symbol} is an unknown kernel, or has unknown configurations: {seen}")


def _pruning(source: ModuleSource, kernel: FunctionNode) -> FunctionNode | None:
    """Return the function that prunes the configurations of the kernel to one stage on Blackwell, or None."""
    for node in (node for decorator in kernel.decorator_list for node in ast.walk(decorator)):
        if isinstance(node, ast.keyword) and node.arg == "prune_configs_by" and (by := _PRUNED.match(node.value)):
            prune = source.function(by.text("prune"))
            if prune is not None and _keeps_one_stage(prune):
                return prune
    return None


def _keeps_one_stage(function: FunctionNode) -> bool:
    compared = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    known = [any(map(pattern.match, compared)) for pattern in (_MAJOR, _STAGES)]
    return all(known) and all(_MAJOR.match(node) or _STAGES.match(node) for node in compared)
