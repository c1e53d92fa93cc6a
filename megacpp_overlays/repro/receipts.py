"""Receipts: logs of runs, kept unchanged, with their hashes and claims.

    FOLDER/NN-slug/receipts/<date>-<cpu or GPU>-<id>.log    the log
    FOLDER/manifest.json                                    host, versions, tree, command, exit code, claims, sha256

The log is the evidence. A check reads it and recomputes everything that the manifest says of it. So the check shows that
log and manifest are consistent, not that the log is authentic: nothing is signed, and an author with write access to both
can invent a run.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays import files
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import inventory, manifest
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.repro.judge import EARNED, Sentinel, meaning
from megacpp_overlays.repro.manifest import ManifestError
from megacpp_overlays.repro.runner import exit_code
from megacpp_overlays.repro.stamp import Stamp
from megacpp_overlays.repro.transcript import paths_in

_CASE = re.compile(
    r"case (?P<case>\S+) \((?:claim: .+|overlay (?P<overlay>[^\s,]+)(?:, fix shown by (?P<fix>\S+))?)\): "
)
_SAID = re.compile(r"(?P<word>[A-Z]+(?:_[A-Z]+)*): .* \(case (?P<case>\S+)\)")
_FOLDER = "receipts"
NO_OVERLAY = "none"
"""Value of the manifest in place of an overlay, for a claim about upstream."""


def prepare(folder: Path, pack: Pack, overlays: Sequence[Erratum]) -> dict[str, Any]:
    """Check that a receipt of this pack can be added to a folder; return the entry of the pack.

    Args:
        folder: any folder; `keep` makes it a folder of packs.
        pack: the pack that will be run.
        overlays: every declared overlay, in parts.

    Raises:
        ManifestError: the folder cannot be written or its manifest cannot be read, it has this pack with another
            reproducer, or the notes of the pack lack a field of the manifest.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logs = folder / pack.name / _FOLDER
        for place in (folder, logs.parent, logs):
            if place.exists():
                tempfile.TemporaryFile(dir=place).close()
        entry = manifest.entry_of(manifest.read(folder), pack.number)
    except OSError as error:
        raise ManifestError(f"--keep: {folder} cannot be written: {error.strerror}") from error
    for there in inventory.list_packs(folder):
        known = inventory.digest(there.reproducer)
        if there.number == pack.number and known and known != inventory.digest(pack.reproducer):
            raise ManifestError(f"--keep: {folder} has pack {pack.number:02} with another reproduce.py")
    if entry is not None and entry["slug"] != pack.slug:
        raise ManifestError(f"--keep: pack {pack.number:02} of {folder} is {entry['slug']}, not {pack.slug}")
    return entry or manifest.derive(pack, overlays, None)


def keep(folder: Path, entry: dict[str, Any], pack: Pack, stamp: Stamp, text: str, command: str) -> str:
    """Add a receipt to a folder of packs; return the name of the log in it.

    Args:
        folder: folder of packs.
        entry: the entry of the pack, as `prepare` returned it; an entry in the manifest takes precedence.
        pack: the pack that was run.
        stamp: the stamp of the run.
        text: the log.
        command: the command line that makes such a log; without paths.
    """
    sentinels, claims = _read(text)
    raw = text.encode(errors="backslashreplace")
    receipt = {
        "log": "",
        "sha256": hashlib.sha256(raw).hexdigest(),
        **stamp.as_dict(),
        "command": command,
        "exit_code": exit_code(sentinels),
        "claims": claims,
    }
    log = receipt["log"] = _name(pack.name, receipt)
    path = folder / log
    with files.locked(folder):
        data = manifest.read(folder)  # as it is now: other runs may have ended since `prepare`
        if (present := manifest.entry_of(data, pack.number)) is None:
            data["packs"].append(present := entry)
        present["receipts"] = [each for each in present["receipts"] if each["log"] != log] + [receipt]
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write({path: raw})
        manifest.write(folder, data)
    return log


def _name(pack: str, receipt: Mapping[str, Any]) -> str:
    gpu = receipt["host"]["gpu"]
    model = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-") if gpu else "cpu"
    return f"{pack}/{_FOLDER}/{receipt['date']}-{model}-{receipt['sha256'][:8]}.log"


def _read(text: str) -> tuple[list[Sentinel], list[dict[str, str]]]:
    """Return every sentinel of a log, and its claims."""
    overlays: dict[str, str] = {}
    own: set[tuple[str, str]] = set()
    sentinels: list[Sentinel] = []
    claims: list[dict[str, str]] = []
    for line in text.split("\n"):
        if found := _CASE.match(line):
            overlays[found["case"]] = found["overlay"] or NO_OVERLAY
            own.add((found["case"], found["fix"]))
        elif found := _SAID.fullmatch(line):
            case, word = found["case"], found["word"]
            if word not in Sentinel.__members__ and (case, word) not in own:
                continue
            sentinels.append(meaning(word))
            if sentinels[-1] in EARNED:
                claims.append({"case": case, "sentinel": word, "overlay": overlays.get(case, "")})
    return sentinels, claims


def problems(folder: Path) -> list[str]:
    """Return the problems of the receipts of a folder of packs, one line each.

    Raises:
        ManifestError: the manifest cannot be read.
    """
    data = manifest.read(folder)
    found: list[str] = []
    named: list[str] = []
    for pack in data["packs"]:
        name = f"{pack['number']:02}-{pack['slug']}"
        for receipt in pack["receipts"]:
            named.append(receipt["log"])
            found += [f"{receipt['log']}: {text}" for text in _wrong_with(folder, name, receipt)]
    found += [
        f"{log}: it is in the manifest more than once" for log in sorted({x for x in named if named.count(x) > 1})
    ]
    kept = {path.relative_to(folder).as_posix() for path in folder.glob(f"*/{_FOLDER}/*")}
    found += [f"{log}: no receipt in the manifest names it" for log in sorted(kept - set(named))]
    return found


def _wrong_with(folder: Path, pack: str, receipt: Mapping[str, Any]) -> list[str]:
    path = folder / receipt["log"]
    if not receipt["log"].startswith(f"{pack}/"):
        return [f"it is not of {pack}"]
    if not path.is_file():
        return ["there is no such log"]
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != receipt["sha256"]:
        return ["its sha256 is another one: the log was changed"]
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return ["it is no text"]
    lines = text.split("\n")
    stamp = Stamp(**{name: receipt[name] for name in ("host", "versions", "tree", "reproducer", "date")})
    sentinels, claims = _read(text)
    wrong = []
    if lines[0] != stamp.line():
        wrong.append("its first line is not the stamp of this host, these versions, tree, reproducer and date")
    if lines[1:2] != [f"$ {receipt['command']}"]:
        wrong.append(f"its second line is not the command: {receipt['command']}")
    if receipt["log"] != _name(pack, receipt):
        wrong.append(f"its name is not that of its date, GPU and hash: {_name(pack, receipt)}")
    if lines[-2:] != [f"exit code {receipt['exit_code']}", ""]:
        wrong.append(f"its last line is not: exit code {receipt['exit_code']}")
    if exit_code(sentinels) != receipt["exit_code"]:
        wrong.append(f"its sentinels mean exit code {exit_code(sentinels)}, not {receipt['exit_code']}")
    wrong += [
        f"it {'claims' if claim in receipt['claims'] else 'does not claim'} {claim['sentinel']} for case "
        f"{claim['case']} of {claim['overlay']}, which the log {'shows' if claim in claims else 'does not show'}"
        for claim in (*receipt["claims"], *claims)
        if (claim in claims) != (claim in receipt["claims"])
    ]
    if (receipt["tree"] is not None) != ("--tree PATH" in receipt["command"]):
        wrong.append("its command and its tree do not fit together")
    if machine := paths_in(text):
        wrong.append(f"it has paths of a machine: {', '.join(machine[:3])}")
    return wrong


def adopt(source: Path, folder: Path) -> list[str]:
    """Copy the receipts of another folder of packs, made on another machine; return the logs that are new.

    Either all of them are copied or none.

    Raises:
        ManifestError: a receipt does not hold there, or is of a pack or of a reproducer that is not here.
    """
    if wrong := problems(source):
        raise ManifestError(f"these receipts do not hold: {'; '.join(wrong)}")
    with files.locked(folder):
        return _adopt(source, folder)


def _adopt(source: Path, folder: Path) -> list[str]:
    data, here = manifest.read(source), manifest.read(folder)
    digests = {pack.number: inventory.digest(pack.reproducer) for pack in inventory.list_packs(folder)}
    new: list[str] = []
    for pack in data["packs"]:
        entry = manifest.entry_of(here, pack["number"])
        if entry is None or entry["slug"] != pack["slug"]:
            raise ManifestError(f"there is no pack {pack['number']:02}-{pack['slug']} here; run receipts --sync first")
        known = {receipt["log"] for receipt in entry["receipts"]}
        fresh = [receipt for receipt in pack["receipts"] if receipt["log"] not in known]
        if other := [receipt["log"] for receipt in fresh if receipt["reproducer"] != digests.get(pack["number"])]:
            raise ManifestError(f"these receipts are of another reproduce.py than the one here: {', '.join(other)}")
        entry["receipts"] += fresh
        new += [receipt["log"] for receipt in fresh]
    for log in new:
        (folder / log).parent.mkdir(parents=True, exist_ok=True)
        files.write({folder / log: (source / log).read_bytes()})
    manifest.write(folder, here)
    return new


def current_of(folder: Path, packs: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of receipts, and the number of those that are of the current reproducer."""
    fresh = total = 0
    for pack in inventory.list_packs(folder):
        digest = inventory.digest(pack.reproducer)
        for entry in packs:
            if entry["number"] == pack.number:
                total += len(entry["receipts"])
                fresh += sum(receipt["reproducer"] == digest for receipt in entry["receipts"])
    return total, fresh
