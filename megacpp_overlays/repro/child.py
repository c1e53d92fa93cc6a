"""The process of one case: `python -m megacpp_overlays.repro.child REPRODUCER CASE REPORT [--probe-only | --witness | --try=SHAPES]`.

Importing the package arms the overlays, as in a launcher. The results go to the file REPORT, one JSON object per
line, because the output belongs to upstream and a process may die at any moment:

    probed   the findings, from source, before anything of upstream is imported
    running  the case begins
    result   the result of the case
    settled  the decisions of the loader and the source of the targets as they are loaded
    beside   the results of the case's neighbours, see `repro.neighbour`

With `--witness` kept witnesses do not count. The report then has the hashes of the sources that were read and loaded, and says
where another source was loaded than was read. With `--try=SHAPES`, shapes by module as JSON, the seams of these shapes are
installed where the probe recognises nothing and they can be placed.

A target whose overlay was retired has no finding and no decision; the report still names its file.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.loader import live, session, witnesses
from megacpp_overlays.loader.probing import examine, examine_to_measure, unless_published
from megacpp_overlays.model import Erratum, Finding, Record, Target, Verdict
from megacpp_overlays.repro import inventory, neighbour
from megacpp_overlays.repro.case import CUDA, Behaviour, Blocked, Case, TargetAbsent
from megacpp_overlays.source.trees import InstalledTree, find_spec, readable

_TRY, _WITNESS = "--try=", "--witness"


def main(arguments: Sequence[str]) -> None:
    """Run the case and write the report."""
    reproducer, name, report, *options = arguments
    cases = inventory.load_cases(Path(reproducer))
    case = inventory.choose(cases, name)
    current = session.current()
    tried = next((json.loads(each.removeprefix(_TRY)) for each in options if each.startswith(_TRY)), None)
    if tried is not None:  # no target has been imported yet
        witnesses.try_out({(str(case.overlay), module): shape for module, shape in tried.items()})
    # Parts that need each other are proved together.
    about = dataclasses.replace(case, targets=()) if tried is not None or _WITNESS in options else case
    parts = {part.target: part for part in inventory.parts_of(about, current.overlays)}
    targets = inventory.targets_of(about, current.overlays)
    with Path(report).open("w", buffering=1) as lines:

        def tell(event: str, **facts: object) -> None:
            print(json.dumps({"event": event, **facts}), file=lines)

        def look(part: Erratum) -> Finding:
            return examine_to_measure(part, InstalledTree(), current.settings)

        witness = _Witness() if _WITNESS in options else None
        probed = {target: _probed((witness.look if witness else look)(part)) for target, part in parts.items()}
        tell("probed", parts=[{**_place(target), **probed.get(target, {})} for target in targets])
        if "--probe-only" in options:
            return
        if (reason := _why_blocked(case, targets)) is not None:
            tell("result", kind="blocked", seen=reason)
            return
        tell("running")
        tell("result", **_answer(case))
        records = {record.overlay: record for record in current.audit().records}
        decided = {
            target: {**_decided(records[part]), **(witness.seen(part) if witness else {})}
            for target, part in parts.items()
        }
        tell("settled", parts=[{**_loaded(target), **decided.get(target, {})} for target in targets])
        for each in neighbour.of(case, cases, Path(reproducer).parent):
            found = neighbour.measured(each)
            tell(
                f"beside {each.name}",
                name=each.name,
                numbers=found.numbers,
                why_not=found.why_not,
                failed=found.failed,
            )


class _Witness:
    """Recorder of the sources that the probes of the parts read, and of those that were loaded when the case had run."""

    def __init__(self) -> None:
        self._trees: dict[Erratum, witnesses.RecordingTree] = {}
        self._findings: dict[Erratum, Finding] = {}

    def look(self, part: Erratum) -> Finding:
        """Return the finding of a part's probe, and record the sources that it reads."""
        self._trees[part] = witnesses.RecordingTree(InstalledTree())
        self._findings[part] = unless_published(part, examine(part, self._trees[part]), InstalledTree())
        return self._findings[part]

    def seen(self, part: Erratum) -> dict[str, object]:
        """Return the hashes of the sources that were read and loaded, and the difference between both."""
        finding = self._findings[part]
        if finding.verdict is not Verdict.UNRECOGNISED:
            return {}
        if part.installs and part.target.module not in sys.modules:
            return {"difference": f"the case has not loaded {part.target.module}"}
        read = dict(self._trees[part].sources)
        now = witnesses.RecordingTree(InstalledTree())
        top = part.target.module.partition(".")[0]
        loaded = [name for name in [*sys.modules] if name.partition(".")[0] == top and _has_text(sys.modules[name])]
        sources = {name: witnesses.sha256_of(now, name) for name in (*read, *loaded)}
        if changed := [name for name in read if sources[name] != read[name]]:
            return {"difference": f"{changed[0]} was changed while the case ran"}
        other = live.difference(finding, InstalledTree()) if finding.looks_repaired else None
        return {"sources": sources, "difference": other}


def _has_text(module: object) -> bool:
    return str(getattr(module, "__file__", None)).endswith(".py")


def _probed(finding: Finding) -> dict[str, object]:
    return {
        "verdict": finding.verdict.value,
        "shape": finding.shape,
        "evidence": finding.summary(),
        "looks_repaired": finding.looks_repaired,
    }


def _place(target: Target) -> dict[str, object]:
    return {**_source(target), "package": _package(target)}


def _source(target: Target) -> dict[str, object]:
    source = readable(InstalledTree(), target.module)
    found = {"file": source.path, "sha256": source.sha256} if source else {"file": None, "sha256": None}
    return {"module": target.module, **found}


def _package(target: Target) -> str | None:
    """Return the file of the package that a target is in, or None when that package is not installed; imports nothing.

    `megatron` may be there without megatron-core: it is a namespace that several distributions share. The search
    therefore starts at the package with the name of the distribution, and takes the first package that is no namespace.
    """
    named = target.distribution.replace("-", ".")
    least = named.count(".") + 1 if f"{target.module}.".startswith(f"{named}.") else 1
    names = target.module.split(".")
    folders: list[str] | None = None
    for depth in range(1, len(names) + 1):
        try:
            spec = find_spec(".".join(names[:depth]), folders, None)
            if spec is None:
                return None
            if depth >= least and spec.has_location and spec.origin:
                return spec.origin
            folders = list(spec.submodule_search_locations or ())
        except (ImportError, KeyError):  # noqa: PERF203 - KeyError: a namespace in one asks for its parent
            folders = [str(Path(folder, names[depth - 1])) for folder in folders or sys.path]
    return None


def _why_blocked(case: Case, targets: Sequence[Target]) -> str | None:
    for target in targets:
        if _package(target) is None:
            return f"{target.distribution} is not installed"
    if case.device != CUDA:
        return None
    if find_spec("torch", None, None) is None:
        return "torch is not installed"
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _answer(case: Case) -> dict[str, object]:
    try:
        behaviour = case.run()
    except Blocked as reason:
        return {"kind": "blocked", "seen": str(reason)}
    except TargetAbsent as missing:
        return {"kind": "absent", "seen": str(missing)}
    except ModuleNotFoundError as error:
        traceback.print_exc()
        if error.name == "torch":
            return {"kind": "blocked", "seen": "torch is not installed"}
        return {"kind": "failed", "seen": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - upstream code may fail in any way; none of them is an answer
        traceback.print_exc()
        return {"kind": "failed", "seen": f"{type(error).__name__}: {error}"}
    if not isinstance(behaviour, Behaviour):
        return {"kind": "failed", "seen": f"the case returned {type(behaviour).__name__}, not a Behaviour"}
    return {"kind": "broken" if behaviour.broken else "sound", "seen": behaviour.seen}


def _loaded(target: Target) -> dict[str, object]:
    return _source(target) if target.module in sys.modules else {"module": target.module}


def _decided(record: Record) -> dict[str, object]:
    return {"decision": record.decision.value, "reason": record.reason}


if __name__ == "__main__":
    main(sys.argv[1:])
    # The report is complete. A process group whose capture failed can wait for ever while the interpreter ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
