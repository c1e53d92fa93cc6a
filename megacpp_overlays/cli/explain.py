"""`megacpp-overlays explain ID`: explain one overlay from its declaration, the kept matrix and files, with nothing imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megacpp_overlays.cli import colours
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids
from megacpp_overlays.loader import explanation, overview, quick, session
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory
from megacpp_overlays.upkeep import reference_pages
from megacpp_overlays.upkeep.reference_pages import FIXED, LEFT_ALONE, REPAIRED, Releases

_TEXT = "Explain an overlay: its defect, the releases that have it, its decision here from files, its switch and its threads. Needs no upstream."
_EXAMPLES = ("explain scheduler-restore", "explain scheduler-restore mla-rope-key-gradient")
_CODES = {ExitCode.CLEAN: "explained, whatever is here"}
_RELEASES = ((REPAIRED, "repairs"), (LEFT_ALONE, "left alone"), (FIXED, "right in"))


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "explain", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("ids", metavar="ID", nargs="+", help="an overlay or a gate")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Print the explanations."""
    current = session.current()
    check_ids(arguments.ids, current.overlays, parser)
    ids = list(dict.fromkeys(arguments.ids))
    audit = quick.audit(current.overlays, current.settings, ids)
    releases = _releases(ids, current.overlays)
    for number, overlay_id in enumerate(ids):
        parts = [record for record in audit.decisions if record.overlay.id == overlay_id]
        head = [overview.Line("")] if number else []
        colours.show([*head, *explanation.explained(parts, facts(releases.get(overlay_id)))])
    print("\nfrom files, with nothing imported; `megacpp-overlays audit ID` imports the target and places the seams")
    return True


def _releases(ids: Sequence[str], overlays: Sequence[Erratum]) -> Mapping[str, Releases]:
    matrix = inventory.own_folder() / "matrix.json"
    if not matrix.is_file():
        return {}
    parts = {name: [each for each in overlays if each.id == name] for name in ids}
    return reference_pages.read_releases(matrix, parts)


def facts(releases: Releases | None) -> list[tuple[str, str]]:
    """Return the releases that an overlay repairs, those that are broken and left alone, and those that are right."""
    if releases is None:
        return []
    found = [(key, releases.with_outcome(outcome)) for outcome, key in _RELEASES]
    return [(key, text) for key, text in found if text != "none"]
