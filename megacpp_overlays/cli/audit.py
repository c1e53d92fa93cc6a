"""`megacpp-overlays audit`: import every installed target in this fresh process and print the decisions."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from megacpp_overlays.cli import colours, commands, witness
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids
from megacpp_overlays.cli.others_output import OthersOutput
from megacpp_overlays.concerns import config_files, report
from megacpp_overlays.errors import AuditFileError, ConfigurationError, OverlayError, RequirementError
from megacpp_overlays.loader import explanation, overview, quick, rendering, requirements, session
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.model import UNDECIDED, Decision, Erratum, Record
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.witnessing import WitnessOptions
from megacpp_overlays.source import distributions
from megacpp_overlays.source.published import key_of
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.upkeep import audit_diff

_TEXT = "Import every installed target in a fresh process and print the decisions, those that need a person first."
_EXAMPLES = (
    "audit",
    "audit -v",
    "audit --quick --config train.sh      # which of them concern the model that train.sh trains",
    "audit --quick      # from files, in a second or two: nothing is imported",
    "audit liger-flce-none-backward",
    "audit --require liger-flce-none-backward=active,retired",
    "audit --html audit.html",
    "audit --html audit.html --of audit.json      # which `run --audit` left",
    "audit --json > audits/lane.json      # once, and look at it",
    "audit --expect audits/lane.json      # in every job of the lane",
)
_CODES = {
    ExitCode.CLEAN: "clean, and as it was asked for",
    ExitCode.FOUND: "a conflict",
    ExitCode.USAGE: "wrong usage, or FILE holds no audit",
    ExitCode.NOTHING_HERE: "no package is here that an overlay is about: this is not the environment of the launcher",
    ExitCode.NOT_AS_ASKED: "a decision is not one that --require or --expect allows; each is named",
    ExitCode.NOT_CHECKED: "a file cannot be written, or the overlays cannot be loaded",
    ExitCode.MISSING_EXTRA: "--html, and the extra `upkeep` is not installed",
}


_NO_FINGERPRINT = "none (--quick)"
_QUICK = """\
quick: read from files. Nothing was imported, no seam was placed and no self-test
  ran; \"active\" is what an import of the target would try. `audit` imports them."""


def add_to(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(subparsers, "audit", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("ids", metavar="ID", nargs="*", help="explain these overlays, and import no other target")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-v", "--verbose", action="store_true", help="print all that is known of each decision")
    how.add_argument("--json", action="store_true", help="print JSON, of the form that --schema prints")
    how.add_argument("--schema", action="store_true", help="print the JSON schema of --json, and look at nothing")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser, too")
    parser.add_argument(
        "--of",
        type=Path,
        metavar="FILE",
        help="with --html: the page of an audit that a run left, and look at nothing here",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="say which active overlays concern the model that FILE configures: Megatron's arguments (a launch script, YAML, JSON, a "
        "log), the repr of a TransformerConfig, or a config.json of transformers",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="import nothing: look contracts and known findings up in files, and run no self-test",
    )
    parser.add_argument("--witness", action="store_true", help="first prove the unproved overlays, as `witness` does")
    parser.add_argument("--deep", action="store_true", help="search the heap, too, for holders of replaced functions")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="ID=DECISION",
        help="fail unless this was decided, or one of several with commas between; may be repeated",
    )
    parser.add_argument(
        "--expect", type=Path, metavar="FILE", help="fail unless the decisions are those of a kept audit"
    )
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the audit; return the exit code."""
    if arguments.schema:
        print(Path(rendering.__file__).with_name("audit.schema.json").read_text(), end="")
        return ExitCode.CLEAN
    if arguments.of:
        return _page_of(arguments, parser)
    current = session.current()
    check_ids(arguments.ids, current.overlays, parser)
    if arguments.ids and (
        arguments.json or arguments.verbose or arguments.html or arguments.require or arguments.expect
    ):
        parser.error("an ID excludes --json, --verbose, --html, --require and --expect, which are about all overlays")
    try:  # before anything is imported: a job with a wrong option fails at once
        known = dict.fromkeys(each.id for each in current.overlays)
        required = [requirements.parse(each, known) for each in arguments.require]
        kept = audit_diff.read(arguments.expect) if arguments.expect else None
    except RequirementError as error:
        parser.error(f"--require {error}")
    except AuditFileError as error:
        parser.error(f"--expect {error}")
    try:
        about = report.concerns(current.overlays, config_files.read(arguments.config)) if arguments.config else None
    except ConfigurationError as error:
        parser.error(f"--config {error}")
    if arguments.quick and (arguments.json or arguments.html or arguments.witness or arguments.deep or arguments.ids):
        parser.error("--quick places no seam: it goes with -v, --require and --expect; for an ID there is `explain`")
    current.log.leave_it_to_the_caller()
    if arguments.quick:
        return _report(arguments, current, quick.audit(current.overlays, current.settings), required, kept, about)
    current.arm()
    if arguments.witness:
        attempts = witness.witness(current, WitnessOptions(packs=inventory.own_folder(), settings=current.settings))
        print(*map(witness.line, attempts), sep="\n", end="\n" if attempts else "", file=sys.stderr)
    said = OthersOutput()
    audit = pre_flight(current, deep=arguments.deep, ids=arguments.ids, said=said)
    said.show(everything=arguments.verbose or bool(arguments.ids))
    if arguments.ids:
        return _explain(audit, arguments.ids, about)
    if arguments.html:
        commands.write_page(arguments.html, _as_dict(audit, about))
    return _report(arguments, current, audit, required, kept, about)


def _report(
    arguments: argparse.Namespace,
    current: session.Session,
    audit: Audit,
    required: Sequence[requirements.Requirement],
    kept: Mapping[str, Any] | None,
    about: report.Concerns | None,
) -> int:
    """Print an audit; return the exit code."""
    if arguments.json:
        print(json.dumps(_as_dict(audit, about), indent=2))
    else:
        _show(arguments, audit, about)
    if arguments.quick:
        print(f"\n{_QUICK}")
    unmet = requirements.unmet(required, audit)
    if kept is not None:
        unmet += requirements.unexpected(kept, audit)
    for each in unmet:
        print(f"megacpp-overlays: {each}", file=sys.stderr)
    if audit.conflicts:
        return ExitCode.FOUND
    if unmet:
        return ExitCode.NOT_AS_ASKED
    if not any(_is_here(overlay) for overlay in current.overlays):
        print(f"megacpp-overlays: {_nothing_here(current.overlays)}", file=sys.stderr)
        return ExitCode.NOTHING_HERE
    return ExitCode.CLEAN


def _as_dict(audit: Audit, about: report.Concerns | None) -> Mapping[str, Any]:
    """Return an audit as plain data, with the facts about the model where --config was given."""
    data = cast("Mapping[str, Any]", audit.as_dict())
    return data if about is None else {**data, "model": report.as_dict(about)}


def _show(arguments: argparse.Namespace, audit: Audit, about: report.Concerns | None) -> None:
    """Print an audit as text."""
    fingerprint = _NO_FINGERPRINT if arguments.quick else audit.fingerprint
    head = (audit.version, audit.mode, fingerprint, audit.decisions, audit.hub_copies)
    active = report.active(audit.decisions)
    unconcerned = [each for each in active if about is not None and not about.is_concerned(each)]
    colours.show(overview.full(*head) if arguments.verbose else overview.short(*head, unconcerned))
    if about is not None:
        colours.show(report.lines(about, active))


def _page_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the page of a kept audit; return the exit code."""
    others = (arguments.ids, arguments.verbose, arguments.json, arguments.witness, arguments.deep, arguments.require)
    if not arguments.html or arguments.expect or any(others):
        parser.error("--of is about the page of a kept audit: it needs --html and goes with nothing else")
    try:
        kept = audit_diff.read(arguments.of)
    except AuditFileError as error:
        parser.error(f"--of {error}")
    commands.write_page(arguments.html, kept)
    undecided = {decision.value for decision in UNDECIDED}
    return ExitCode.FOUND if any(each["decision"] in undecided for each in kept["decisions"]) else ExitCode.CLEAN


def _explain(audit: Audit, ids: Sequence[str], about: report.Concerns | None) -> int:
    """Print the explanations of some overlays; return the exit code."""
    shown = [record for record in audit.records if record.overlay.id in ids]
    for number, overlay_id in enumerate(dict.fromkeys(ids)):
        parts = [record for record in audit.decisions if record.overlay.id == overlay_id]
        facts = [("this model", report.sentence(about, overlay_id))] if about is not None else []
        colours.show([*([overview.Line("")] if number else []), *explanation.explained(parts, facts)])
    if any(record.decision in UNDECIDED for record in shown):
        return ExitCode.FOUND
    return ExitCode.CLEAN


def _is_here(erratum: Erratum) -> bool:
    """Return whether a package of an overlay's target is installed, with the target or without it."""
    parts = erratum.target.module.split(".")
    tree = InstalledTree()
    try:
        return any(tree.module(".".join(parts[:depth])) is not None for depth in range(1, len(parts) + 1))
    except OverlayError:  # it is here, and cannot be read
        return True


def _nothing_here(overlays: Sequence[Erratum]) -> str:
    names = ", ".join(sorted({each.target.distribution for each in overlays}))
    return (
        f"none of the packages is here that overlays are about ({names}); run the audit with the Python of the launcher, "
        f"which is not {sys.executable}"
    )


def pre_flight(
    current: session.Session, *, deep: bool = False, ids: Sequence[str] = (), said: OthersOutput | None = None
) -> Audit:
    """Import every installed target, and return the audit.

    A target that cannot be imported here counts as a conflict. It waits instead where a package is missing that its distribution does not
    require: a package of an extra, or any that a second package of the distribution needs, as `megatron.training` of megatron-core does.

    Args:
        current: the session of this process.
        deep: see `megacpp_overlays.audit`.
        ids: import the targets of these overlays alone; empty for all.
        said: captures the output of other libraries during the imports, with progress on stderr; None leaves their output alone.
    """
    failures: dict[str, str] = {}
    lacking: dict[str, ModuleNotFoundError] = {}
    waiting = dict(_to_import(current.audit().records, ids))
    counts = Counter(waiting.values())
    for module, distribution in waiting.items():
        if said is not None and (count := counts.pop(distribution, 0)):
            many = "module" if count == 1 else "modules"
            print(f"megacpp-overlays: importing {count} {many} of {distribution}", file=sys.stderr, flush=True)
        try:
            with said.kept() if said is not None else contextlib.nullcontext():
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - upstream code may fail in any way; the report says how
            failures[module] = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and _outermost(error.name or module) != _outermost(module):
                lacking[module] = error
    audit = current.audit(deep=deep)
    return replace(audit, records=tuple(_with_failure(record, failures, lacking) for record in audit.records))


def _outermost(module: str) -> str:
    return module.partition(".")[0]


def _to_import(records: Sequence[Record], ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield modules to import, each with its distribution."""
    for record in records:
        waits = record.decision is Decision.ARMED
        # An overlay that is off and requested by its id is imported, too, to show its state here.
        if (waits and not ids) or (record.overlay.id in ids and (waits or record.decision is Decision.DISABLED)):
            yield record.overlay.target.module, record.overlay.target.distribution


def _with_failure(record: Record, failures: dict[str, str], lacking: dict[str, ModuleNotFoundError]) -> Record:
    target = record.overlay.target
    failure, missing = failures.get(target.module), lacking.get(target.module)
    if record.decision is not Decision.ARMED or failure is None:
        return record
    if missing is not None and (
        key_of(target) != target.distribution
        or distributions.is_extra(target.distribution, _outermost(missing.name or ""))
    ):
        return replace(record, reason=f"{target.module} cannot be imported here and waits: {missing}")
    reason = f"{record.overlay.target.module} is installed but cannot be imported here: {failure}"
    return replace(record, decision=Decision.CONFLICT, reason=reason)
