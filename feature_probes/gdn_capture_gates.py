"""Reads of packed sequence lengths from the host, in a captured forward pass of the gated delta net.

With packed sequences `forward` resolves `cu_seqlens` twice, for queries and for keys, and each time reads the last
entry and the divisibility by the context-parallel size from the host; then it asserts that `torch.equal` holds for the
two. 0.18.0 to 0.18.2 and trees up to 2026-07-08 have it in one file, 0.19.x, main and dev in a base class; dev and main
share the body. Earlier releases refuse packed sequences.

No repair has been seen yet. Which code reads from the host does not show in its names, so a body that is not known is
UNRECOGNISED, whatever it calls. One that calls nothing of what is known to read, nor do its callers, looks repaired: a
witness may prove it. FIXED takes the fingerprints of a repair that was read, with everything in the modules that call it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.host_reads import reads
from megacpp_overlays.feature_probes.repairs import Repairs, judged
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, ModuleSource, SourceTree

_PACKAGE = "megatron.core.ssm.gated_delta_net"
SINGLE = Target(distribution="megatron-core", module=_PACKAGE, symbol="GatedDeltaNet._resolve_cu_seqlens")
COMMON = Target(distribution="megatron-core", module=f"{_PACKAGE}.common", symbol="_GDNBase._resolve_cu_seqlens")

READ_LENGTHS = "packed-lengths-read-on-host"

_BODIES = {
    "b39e050347278bd9": "0.18.0 and 0.18.2",
    "60d632a69727e7df": "0.19.0, 0.19.2, main, dev; PR 3674, main of 2026-06-25 and of 2026-07-08",
}
_REPAIRED: Repairs = {}
"""No repair was read yet."""
_CALLERS = {SINGLE.module: (_PACKAGE,), COMMON.module: (f"{_PACKAGE}.gdn", f"{_PACKAGE}.gdn2")}
"""Modules whose forward pass calls it. Not every tree has the last."""
_NAMES = ["'cu_seqlens_q'", "'cu_seqlens_kv'"]
_EQUAL = "torch.equal(cu_seqlens_q, cu_seqlens_kv)"


def probe_single(tree: SourceTree) -> Finding:
    """Return whether a gated delta net in one file reads packed lengths from the host."""
    return _probe(tree, SINGLE)


def probe_common(tree: SourceTree) -> Finding:
    """Return whether the base class of the gated delta nets reads packed lengths from the host."""
    return _probe(tree, COMMON)


def _probe(tree: SourceTree, target: Target) -> Finding:
    source = tree.module(target.module)
    if source is None:
        return absent(f"there is no module {target.module}")
    class_name, _, method = target.symbol.partition(".")
    if target is SINGLE and _hands_on(source, tree, class_name):
        return absent(f"{source.name} defines no {class_name}")
    if (cls := plain_class(source, class_name)) is None:
        return absent(f"{source.name} defines no {class_name}")
    function = plain_function(source, target.symbol)
    if function is None:
        if method in words(source.syntax) or [ast.unparse(each) for each in cls.bases] != ["MegatronModule"]:
            raise unknown(source, cls, f"{target.symbol} may be inherited or made elsewhere")
        return absent(f"{target.symbol} does not exist: packed sequences are not supported")
    callers = [caller for name in _CALLERS[target.module] if (caller := tree.module(name)) is not None]
    if not callers:
        raise unknown(source, function, "nothing that calls it was found")
    if (body := fingerprint(function)) not in _BODIES and not _may_read(function, callers):
        nothing = at(source, function, f"{target.symbol} and its callers call nothing that is known to read lengths")
        places = [f"{source.name}:{target.symbol}", *(f"{caller.name}:" for caller in callers)]
        return judged(tree, _REPAIRED, nothing, places=places)
    if body not in _BODIES:
        raise unknown(source, function, f"{target.symbol} has an unknown body {body}")
    compared = [_comparison(caller) for caller in callers]
    seen = [at(source, call, f"the host reads {ast.unparse(call)}") for call in [*reads(function)][:2]]
    return broken(READ_LENGTHS, *seen, *compared, Evidence(seen=f"as in {_BODIES[body]}"))


def _may_read(function: FunctionNode, callers: Sequence[ModuleSource]) -> bool:
    """Return whether a method calls what reads from the host, or a caller compares what it gets of it."""
    return any(reads(function)) or any(calls(caller.syntax, "equal") for caller in callers)


def _hands_on(source: ModuleSource, tree: SourceTree, class_name: str) -> bool:
    """Return whether this is the package that hands on the class of its own module, whose base is the other part."""
    bound = source.bindings.of(class_name)
    imports = [node for node in source.syntax.body if isinstance(node, ast.ImportFrom)]
    home = [node.module for node in imports if len(bound) == 1 and bound[0] in node.names]
    return home == [_CALLERS[COMMON.module][0]] and tree.module(COMMON.module) is not None


def _comparison(caller: ModuleSource) -> Evidence:
    """Return where a caller compares the lengths of queries and keys, which it resolves once each."""
    resolved = [call.args[3:4] for call in calls(caller.syntax, "_resolve_cu_seqlens")]
    if [ast.unparse(each[0]) if each else "" for each in resolved] != _NAMES:
        raise unknown(caller, None, "does not resolve once for queries and once for keys")
    compared = calls(caller.syntax, "equal")
    if [ast.unparse(each) for each in compared] != [_EQUAL]:
        raise unknown(caller, None, "does not compare the two in the one way that is known")
    return at(caller, compared[0], f"the host waits for {_EQUAL}")
