"""Quick audit: decisions from the installed files alone, without an import of upstream.

Known findings, probes and contracts are applied to the installed source. No seam is placed, so no self-test runs, and third-party
code in the place of upstream's is not detected. ACTIVE means that an import of the target would try to place the seams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import derived_records, needs, probing
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.decide import before_import, decide
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Erratum, Gate, Overlay, Record
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import CachedTree, InstalledTree, ParsedOnce, SourceTree
from megacpp_overlays.version import VERSION


def audit(overlays: Sequence[Erratum], settings: Settings, ids: Collection[str] = ()) -> Audit:
    """Return an audit of the installed source.

    Args:
        overlays: every declaration.
        settings: of this process.
        ids: the overlays to audit, also those that are off; empty for all that are on.
    """
    tree = CachedTree(ParsedOnce(InstalledTree()))
    chosen = [each for each in overlays if not ids or each.id in ids]
    found = {each: _record(each, settings, tree, even_if_off=bool(ids)) for each in chosen}

    def standing(part: Overlay) -> Record:
        return found.get(part) or _record(part, settings, tree, even_if_off=False)

    parts = [each for each in overlays if isinstance(each, Overlay)]
    for each, record in found.items():
        if isinstance(each, Overlay) and record.decision is Decision.ACTIVE:
            why = needs.unmet((standing(part) for part in needs.parts(each, parts)), each)
            found[each] = replace(record, decision=Decision.CONFLICT, reason=why) if why else record
    return Audit(version=VERSION, mode=settings.mode.value, settings=settings, records=tuple(found.values()))


def _record(erratum: Erratum, settings: Settings, tree: SourceTree, *, even_if_off: bool) -> Record:
    record = before_import(erratum, settings)
    if record.decision is Decision.DISABLED and not even_if_off:
        return record
    if isinstance(erratum, Gate):
        return derived_records.with_versions(probing.assess_gate(erratum, settings, tree))
    there = derived_records.if_absent(record, tree)
    if there is not record:
        return there
    decided = decide(erratum, settings, probing.known_or_examined(erratum, tree, settings))
    return replace(decided, version=distributions.version(erratum.target.distribution))
