"""Decide a gate: is a combination installed that cannot work?

A gate waits for no import. It is read from source when the session is armed, so that a run is told before its first
compile; where none of its packages is installed that costs a look for one folder. What is not there then is looked for
again when a target is imported, and for an audit: a launcher may complete its path after it imported this package.

A gate installs nothing, and may depend on the GPUs of a host. So it has no part in what ranks and children are compared by.
"""

from __future__ import annotations

from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Finding, Gate, Record
from megacpp_overlays.source.trees import SourceTree, readable


def settle(gate: Gate, settings: Settings, tree: SourceTree) -> Record:
    """Probe what is installed and decide; raises nothing. A gate that is switched off is not asked."""
    finding = examine(gate, tree)
    decision = decide(
        mode=settings.mode,
        switch=settings.switch(gate.id),
        verdict=finding.verdict,
        installable=finding.shape in gate.unsupported,
        gate=True,
    )
    source = None if decision is Decision.ABSENT else readable(tree, gate.target.module)
    return Record(
        overlay=gate,
        decision=decision,
        reason=_reason(gate, finding, decision),
        finding=finding,
        version=versions(gate) if decision in {Decision.GATED, Decision.CONFLICT} else None,
        source_sha256=source.sha256 if source else None,
    )


def _reason(gate: Gate, finding: Finding, decision: Decision) -> str:
    if decision is not Decision.GATED:
        return finding.summary()
    return f"{gate.breaks}. What to do: {gate.unsupported[finding.shape or '']}. Seen: {finding.summary()}"


def versions(gate: Gate) -> str | None:
    """Return the versions of the combination, such as `2.3.2.post1 with tilelang 0.1.15`; None where nothing is here."""
    from megacpp_overlays.source import distributions  # noqa: PLC0415 - 28 ms that most processes need not spend

    own = distributions.version(gate.target.distribution)
    others = [f"{name} {found}" for name in gate.beside if (found := distributions.version(name))]
    if own is None:
        return None
    return " with ".join([own, *([" and ".join(others)] if others else [])])
