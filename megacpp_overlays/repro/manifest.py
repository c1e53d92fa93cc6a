"""`packs/manifest.json`: the claims of every pack, derived from its folder and the declarations, never typed twice.

    number, slug                  the name of the folder
    title, class, state           the heading of README.md, and its lines `Class` and `Lifecycle state`
    repository, upstream,         `pack.toml`; null, and no files, where there is none
    priority, files
    overlays                      the declarations of the overlays with this pack number
    targets, threads              those of the overlays, those of overlays that were retired, and those of `pack.toml`
    threads[].checked             `threads.json`, the last answers about upstream's threads; else the date in the manifest
    receipts                      kept in the manifest alone

A claim needs a kept log: `problems` refuses a state or a class that the receipts do not show. A receipt counts if it is of
the current reproducer and of upstream itself, not of a stand-in, and if nothing failed in it. A pack without a reproducer
is always a draft. A pack that is ready to be sent also has a repository, the result of a search there, a priority, and
threads that were looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_overlays import json_text
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.files import write_text
from megacpp_overlays.loader import retired
from megacpp_overlays.model import Erratum, Thread
from megacpp_overlays.repro import inventory, pack_file, schema
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.repro.judge import Sentinel, meaning
from megacpp_overlays.repro.trees import STAND_IN

SCHEMA = 1
NAME, SCHEMA_NAME, README = "manifest.json", "manifest.schema.json", "README.md"
THREADS = "threads.json"
STALE, MISSING = "is not as the notes and declarations have it", "not in the manifest"
"""Words of `problems` about an entry that `synchronise` would change."""

CLASSES = ("overlay", "gate", "fork", "bug report", "regression guard", "held")
STATES = ("draft", "reproduced", "validated", "ready", "filed", "merged", "retired")
"""Lifecycle states, in order. From `ready` on a pack is fit to be sent, so every thread has been looked at."""

_PROOF = {
    "overlay": (Sentinel.FIX_VALIDATED,),
    "gate": (Sentinel.BUG_REPRODUCED,),
    "fork": (Sentinel.FIX_VALIDATED,),
    "bug report": (Sentinel.BUG_REPRODUCED,),
    "regression guard": (Sentinel.BUG_NOT_PRESENT,),
    "held": (Sentinel.FIX_VALIDATED, Sentinel.CLAIM_HOLDS),
}
"""Sentinels of which a receipt must show one for the state `validated`, by class."""


class ManifestError(OverlayError):
    """Raised when a manifest cannot be read, or the notes of a pack lack a field of the manifest."""


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of packs; an empty manifest where the folder has none.

    Raises:
        ManifestError: the manifest is no JSON, or does not fit the schema.
    """
    path = folder / NAME
    if not path.exists():
        return {"schema": SCHEMA, "packs": []}
    try:
        data: dict[str, Any] = json_text.parse(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{NAME} is no JSON: {error}") from error
    rules = json.loads((inventory.own_folder() / SCHEMA_NAME).read_text())
    if found := schema.problems(data, rules):
        raise ManifestError(f"{NAME} does not fit its schema: {'; '.join(found)}")
    return data


def write(folder: Path, data: Mapping[str, Any]) -> None:
    """Write a manifest, packs by number and receipts by name."""
    packs = [
        {**pack, "receipts": sorted(pack["receipts"], key=lambda receipt: str(receipt["log"]))}
        for pack in sorted(data["packs"], key=lambda pack: int(pack["number"]))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "packs": packs}, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / NAME, text)


def entry_of(data: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return the entry of a pack, or None."""
    return next((pack for pack in data["packs"] if pack["number"] == number), None)


def derive(pack: Pack, overlays: Sequence[Erratum], kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry of a pack, derived from its folder and the declarations.

    Args:
        pack: the folder.
        overlays: every declared overlay, in parts.
        kept: the present entry, for the fields that only the manifest has.

    Raises:
        ManifestError: the notes lack a heading, a class or a state, or the saved answers about threads cannot be read.
        PackError: its `pack.toml` cannot be read.
    """
    mine = [overlay for overlay in overlays if overlay.pack == pack.number]
    said = pack_file.read(pack.folder) if (pack.folder / pack_file.NAME).exists() else None
    gone = [each for each in retired.read() if each.pack == pack.number]
    targets = [overlay.target for overlay in mine] + [target for each in gone for target in each.targets]
    threads = [thread for overlay in mine for thread in overlay.threads]
    threads += [thread for each in gone for thread in each.threads]
    return {
        "number": pack.number,
        "slug": pack.slug,
        **_notes(pack),
        "repository": said.repository if said else None,
        "upstream": said.upstream if said else None,
        "priority": said.priority if said else None,
        "files": list(said.files) if said else [],
        "targets": [target._asdict() for target in dict.fromkeys((*targets, *(said.targets if said else ())))],
        "overlays": list(dict.fromkeys(overlay.id for overlay in mine)),
        "threads": _threads(pack, [*threads, *(said.threads if said else ())], kept),
        "receipts": list((kept or {}).get("receipts", ())),
    }


def _threads(pack: Pack, threads: Sequence[Thread], kept: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the threads of a pack, with the day of the last check; of a thread that is named twice, the first counts."""
    checked = {(each["repository"], each["number"]): each["checked"] for each in (kept or {}).get("threads", ())}
    checked |= _answered(pack.folder.parent)
    states: dict[tuple[str, int], str] = {}
    for thread in threads:
        states.setdefault((thread.repository, thread.number), thread.state)
    return [
        {"repository": repository, "number": number, "state": state, "checked": checked.get((repository, number))}
        for (repository, number), state in states.items()
    ]


def _answered(folder: Path) -> dict[tuple[str, int], str]:
    """Return the day of the last answer about each thread; `megacpp-overlays sweep` writes the file and checks the rest."""
    path = folder / THREADS
    try:
        threads = json_text.parse(path.read_text())["threads"] if path.exists() else []
        return {(each["repository"], each["number"]): each["checked"] for each in threads}
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{THREADS} is not in the format of `megacpp-overlays sweep`: {error!r}") from error


def _notes(pack: Pack) -> dict[str, str]:
    path = pack.folder / README
    text = path.read_text() if path.exists() else ""
    heading = re.search(r"^# (?:[Pp]ack )?(?:\d\d)?[:. ]*(.+)$", text, re.MULTILINE)
    found = {"title": heading[1].strip() if heading else None}
    for name, label, words in (("class", "class", CLASSES), ("state", "lifecycle state", STATES)):
        # A heading, a table row or a bold word: the label, then anything but a word, then the value.
        value = re.search(rf"^[^\w\n]*{label}\W+({'|'.join(words)})\b", text, re.MULTILINE | re.IGNORECASE)
        found[name] = value[1].lower() if value else None
    if missing := [name for name, value in found.items() if value is None]:
        raise ManifestError(f"{pack.name}/{README} does not say its {', '.join(missing)}")
    return {name: str(value) for name, value in found.items()}


def synchronise(folder: Path, overlays: Sequence[Erratum]) -> dict[str, Any]:
    """Return the manifest, derived anew from the folders and the declarations, with its receipts and dates."""
    data = read(folder)
    packs = inventory.list_packs(folder)
    return {"schema": SCHEMA, "packs": [derive(pack, overlays, entry_of(data, pack.number)) for pack in packs]}


def problems(folder: Path, overlays: Sequence[Erratum]) -> list[str]:
    """Return the problems of the claims of a folder of packs, one line each; the logs are checked elsewhere."""
    data = read(folder)
    gates = frozenset(each.id for each in overlays if not each.installs)
    digests = {pack.number: inventory.digest(pack.reproducer) for pack in inventory.list_packs(folder)}
    found = [
        f"{pack['number']:02}: {text}"
        for pack in data["packs"]
        for text in _overclaims(pack, digests.get(pack["number"], ""), gates)
    ]
    expected = synchronise(folder, overlays)
    for number in sorted({pack["number"] for pack in (*data["packs"], *expected["packs"])}):
        entry, wanted = entry_of(data, number), entry_of(expected, number)
        if entry is None or wanted is None:
            found.append(f"{number:02}: {MISSING if entry is None else 'there is no such folder'}")
            continue
        stale = [name for name in wanted if name not in entry or entry[name] != wanted[name]]
        found += [f"{number:02}: {name} {STALE}" for name in stale]
    return found


def _counts(receipt: Mapping[str, Any], digest: str) -> bool:
    """Return whether a receipt is of upstream itself and of the current reproducer, and nothing failed in it."""
    stand_in = STAND_IN in (receipt["tree"] or {})
    return receipt["reproducer"] == digest and receipt["exit_code"] == 0 and not stand_in


def _overclaims(pack: Mapping[str, Any], digest: str, gates: frozenset[str]) -> Iterator[str]:
    """Yield the claims of a pack that its receipts do not show."""
    kind, state, overlays = pack["class"], pack["state"], pack["overlays"]
    repairs = [overlay for overlay in overlays if overlay not in gates]
    counted = [receipt for receipt in pack["receipts"] if _counts(receipt, digest)]
    shown = {(meaning(claim["sentinel"]), claim["overlay"]) for receipt in counted for claim in receipt["claims"]}
    if kind == "overlay" and not repairs:
        yield "its class is overlay, and no overlay has its number"
    if kind == "gate" and not gates.intersection(overlays):
        yield "its class is gate, and no gate has its number"
    if kind == "regression guard" and repairs:
        yield "its class is regression guard, and an overlay still has its number"
    if kind == "held" and STATES.index(state) > STATES.index("validated"):
        yield f"it is held, and its state is {state}"
    if state not in {"draft", "retired"} if kind == "regression guard" else state == "retired":
        yield f"its class is {kind}, and its state is {state}: a retired pack is a regression guard, and nothing else"
    if state == "draft":
        return
    proofs = (Sentinel.BUG_REPRODUCED,) if state == "reproduced" else _PROOF[kind]
    for overlay in overlays or [None]:
        if not any(sentinel in proofs and overlay in {None, about} for sentinel, about in shown):
            about = f" for {overlay}" if overlay else ""
            yield f"its state is {state}, and no receipt shows {' or '.join(proof.value for proof in proofs)}{about}"
    if STATES.index(state) >= STATES.index("ready"):
        yield from _not_fit_to_be_sent(pack)


def _not_fit_to_be_sent(pack: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requirements that a pack lacks that is ready, or was sent.

    A regression guard was ready once and is not sent again.
    """
    state = pack["state"]
    for thread in pack["threads"]:
        if thread["checked"] is None:
            yield f"its state is {state}, and {thread['repository']}#{thread['number']} has no date checked"
    if pack["class"] == "regression guard":
        return
    if pack.get("upstream") is None:
        yield f"its state is {state}, and no {pack_file.NAME} has the result of a search of upstream"
    elif state == "ready" and pack["upstream"] in pack_file.SETTLED:
        yield f"its state is ready, and upstream has it {pack['upstream']}: it becomes a regression guard or stays local"
    if pack.get("priority") == "none":
        yield f"its state is {state}, and its priority is none: that is never filed"
