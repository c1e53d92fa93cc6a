"""The process that `evidence` starts in an environment: `python -m megacpp_overlays.upkeep.inside REPORT ...`.

    REPORT probe                              the findings of the probes, without importing upstream code
    REPORT run REPRODUCER CASE TIMEOUT        run a case, without its overlay and then with every overlay
    REPORT witness PACKS TIMEOUT ID ...       prove the parts of these overlays that look repaired, and keep the witnesses

The answer is written to the file REPORT as JSON, because upstream code may print to the output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.loader import session
from megacpp_overlays.loader.probing import examine_to_measure
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.repro import ending, inventory, runner, witnessing
from megacpp_overlays.repro.transcript import Transcript
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import CachedTree, InstalledTree
from megacpp_overlays.upkeep.ledger import is_due


def main(arguments: Sequence[str]) -> None:
    """Run the requested action and write the report."""
    report, action, *rest = arguments
    overlays, settings = session.current().overlays, session.current().settings
    if action == "probe":
        answer: object = _probed(overlays, settings)
    elif action == "witness":
        packs, timeout, *ids = rest
        answer = _witnessed(Path(packs), float(timeout), [each for each in overlays if each.id in ids], settings)
    else:
        reproducer, case, timeout = rest
        answer = _run(Path(reproducer), case, float(timeout), overlays)
    Path(report).write_text(json.dumps(answer))


def _probed(overlays: Sequence[Erratum], settings: Settings) -> list[dict[str, object]]:
    """Return the finding of each part's probe; known findings are looked up, and each file is read once."""
    tree = CachedTree(InstalledTree())
    findings = [examine_to_measure(part, tree, settings) for part in overlays]
    verdicts: dict[str, set[Verdict]] = {}
    for part, finding in zip(overlays, findings, strict=True):
        verdicts.setdefault(part.id, set()).add(finding.verdict)
    return [
        {
            "overlay": part.id,
            "module": part.target.module,
            "target": str(part.target),
            "distribution": part.target.distribution,
            "version": distributions.version(part.target.distribution),
            "verdict": finding.verdict.value,
            "shape": finding.shape,
            "evidence": finding.summary(),
            "looks_repaired": finding.looks_repaired,
            "can_be_proved": witnessing.can_be_proved(part, finding, tree),
            "has_seams": part.answers(finding.shape),
            "gate": not part.installs,
            "opt_in": part.off_by_default,
            "beside": {name: distributions.version(name) for name in part.companions},
            "left_alone": part.unsupported.get(finding.shape or ""),
            "due": is_due(verdicts[part.id]),
        }
        for part, finding in zip(overlays, findings, strict=True)
    ]


def _witnessed(packs: Path, timeout: float, overlays: Sequence[Erratum], settings: Settings) -> list[dict[str, object]]:
    how = witnessing.WitnessOptions(packs=packs, settings=settings, timeout=timeout)
    attempts = witnessing.prove(overlays, witnessing.unproved(witnessing.found_here(overlays, settings)), how)
    return [{"overlay": e.overlay, "module": e.target, "proved": e.proved, "reason": e.reason} for e in attempts]


def _run(reproducer: Path, name: str, timeout: float, overlays: tuple[Erratum, ...]) -> list[list[str]]:
    case = inventory.choose(inventory.load_cases(reproducer), name)
    job = runner.Job(reproducer=reproducer, cases=(case,), overlays=overlays, command="", timeout=timeout)
    said = runner.run_case(job, case, Transcript([], lambda line: None))
    return [[each.sentinel.value, each.reason] for each in said]


if __name__ == "__main__":
    with ending.by_exception():
        main(sys.argv[1:])
