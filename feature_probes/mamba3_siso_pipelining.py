"""May the tuner give the Mamba-3 SISO forward kernel more than one stage on Blackwell?

On compute capability 10 and 12, more than one stage of software pipelining corrupts the output of this recurrent kernel
without an error (state-spaces/mamba#997, seen there with Triton 3.5.1 to 3.7.0). 2.3.2.post1 lets the tuner choose
among one, two and three; main drops all but one on those devices since 2026-07-23.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed, unrecognised
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

TARGET = Target(
    distribution="mamba-ssm",
    module="mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd",
    symbol="mamba3_siso_fwd_kernel",
)
ANY_STAGES = "any-number-of-stages"

_TUNED = {"b934a2a6611e3fa6": "2.3.2.post1"}
"""Decorators of the kernel: the configurations that its tuner has."""
_WHOLE = {"68d8d0dba0e3913f": "2.3.2.post1"}
"""The same by the text of the whole module: a gate is read at start-up, and parsing it takes 50 ms."""
_PRUNE = "early_config_prune"


def probe(tree: SourceTree) -> Finding:
    """Return whether the tuner is kept from more than one stage."""
    try:
        source = tree.module(TARGET.module)
        if source is None:
            return absent(f"there is no {TARGET.module}")
        if (text := source.sha256[:16]) in _WHOLE:
            return broken(
                ANY_STAGES, cpp_source.at(source, f"def {TARGET.symbol}(", f"configurations as in {_WHOLE[text]}")
            )
        kernel = source.function(TARGET.symbol)
        if kernel is None:
            return absent(f"{TARGET.module} has no {TARGET.symbol}")
        if (seen := fingerprint(kernel.decorator_list)) in _TUNED:
            return broken(ANY_STAGES, at(source, kernel, f"configurations as in {_TUNED[seen]}"))
        if (prune := _pruning(source, kernel)) is not None:
            return fixed(at(source, prune, f"{prune.name} keeps one stage on compute capability 10 and 12"))
    except SourceError as error:
        return unrecognised(Evidence(seen=str(error)))
    return unrecognised(at(source, kernel, f"{TARGET.symbol} has unknown configurations {seen}"))


def _pruning(source: ModuleSource, kernel: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | None:
    """Return the function that prunes the configurations of the kernel to one stage on Blackwell, or None."""
    for node in (node for decorator in kernel.decorator_list for node in ast.walk(decorator)):
        match node:
            case ast.keyword(
                arg="prune_configs_by", value=ast.Dict(keys=[ast.Constant(value=key)], values=[ast.Name(id=name)])
            ):
                found = source.function(name)
                if key == _PRUNE and isinstance(found, ast.FunctionDef) and _keeps_one_stage(found):
                    return found
    return None


def _keeps_one_stage(function: ast.FunctionDef) -> bool:
    says = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Compare)}
    return says == {"major in (10, 12)", "config.num_stages == 1"}
