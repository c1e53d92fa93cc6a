"""The report of a sweep, as lines for people and as plain data for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megacpp_overlays import terminal_text
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep.sweep.sweep import Sweep, SweptThread
from megacpp_overlays.upkeep.sweep.threads import NAME, Answer, to_json

_PROOF = "landing is no proof: the probe decides"


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An overlay, or a pack without one, that may be retired because a thread of it landed."""

    overlay: Erratum | None
    pack: int
    reproducer: bool
    """Whether the pack has one; True where there is an overlay."""
    landed: tuple[SweptThread, ...]

    @property
    def name(self) -> str:
        """The name in the report."""
        return f"{self.overlay.id} (pack {self.pack:02})" if self.overlay else f"pack {self.pack:02}"

    @property
    def released(self) -> bool:
        """Whether any landed thread is in a release."""
        return any(each.now is not None and each.now.released_in for each in self.landed)

    def steps(self) -> list[str]:
        """Return the commands to run next."""
        if self.overlay is None:
            return [f"megacpp-overlays repro {self.pack}" if self.reproducer else "megacpp-overlays pack list"]
        tree = "" if self.released else " --tree CHECKOUT"
        first = f"megacpp-overlays matrix {self.overlay.id}{tree}"
        return [first, "megacpp-overlays triage --from LOCK --to LOCK", "megacpp-overlays ledger --due"]


def candidates(sweep: Sweep) -> list[Candidate]:
    """Return the candidates for retirement: overlays by pack and id, then packs without one."""
    overlays: dict[str, tuple[Erratum, list[SweptThread]]] = {}
    packs: dict[int, tuple[Pack, list[SweptThread]]] = {}
    for each in sweep.threads:
        if not each.landed:
            continue
        for overlay in each.waiting.overlays:
            overlays.setdefault(overlay.id, (overlay, []))[1].append(each)
        for pack in each.waiting.packs:
            packs.setdefault(pack.number, (pack, []))[1].append(each)
    by_pack = sorted(overlays.values(), key=lambda pair: (pair[0].pack, pair[0].id))
    found = [Candidate(overlay, overlay.pack, True, tuple(landed)) for overlay, landed in by_pack]
    alone = [packs[number] for number in sorted(packs)]
    return found + [Candidate(None, pack.number, pack.reproducer.is_file(), tuple(landed)) for pack, landed in alone]


def lines(sweep: Sweep) -> list[str]:
    """Return the report for people: a table, then news, next steps and failures."""
    return [
        *_table(sweep),
        *_section("Since the last look:", [f"{each.waiting}: {each.news}" for each in sweep.threads if each.news]),
        *_retirement(sweep),
        *_section("Declared otherwise:", _contradictions(sweep)),
        *_section(
            "No answer this time:", [f"{each.waiting}: {each.failure}" for each in sweep.threads if each.failure]
        ),
        "",
        *_summary(sweep),
    ]


def _table(sweep: Sweep) -> list[str]:
    rows = [
        (
            str(each.waiting),
            each.now.sentence() if each.now else "never looked up",
            _seen(sweep, each.now) if each.now else "-",
            each.waiting.waiters(),
        )
        for each in sweep.threads
    ]
    return aligned(("thread", "state", "seen", "waits for it"), rows) if rows else []


def _seen(sweep: Sweep, answer: Answer) -> str:
    age = (sweep.day - answer.checked).days
    return f"{answer.checked}, {age} days ago, {answer.source}" if age else f"today, {answer.source}"


def _section(title: str, found: list[str]) -> list[str]:
    return ["", title, *(f"  {terminal_text.one_line(line)}" for line in found)] if found else []


def _retirement(sweep: Sweep) -> list[str]:
    found = []
    for each in candidates(sweep):
        found.append(each.name)
        if each.overlay:
            found.append(f"  deleted when {each.overlay.retire_when}")
        found += [f"  {one.waiting}: {one.now.sentence()}" for one in each.landed if one.now]
        found.append(f"  next: {'; '.join(each.steps())}")
    return _section(f"Up for retirement ({_PROOF}):", found)


def _contradictions(sweep: Sweep) -> list[str]:
    return [
        f"{each.waiting}: {declared.where} says {declared.state!r}; it {wrong}; change it there, and then `declared` in {NAME}"
        for each in sweep.threads
        for declared, wrong in each.contradictions()
    ]


def _summary(sweep: Sweep) -> list[str]:
    landed = sum(each.landed for each in sweep.threads)
    happened = sum(each.news is not None for each in sweep.threads)
    total = f"{len(sweep.threads)} threads: {happened or 'nothing'} new, {landed or 'nothing'} landed"
    found = [f"{total}; {_source(sweep)}"]
    if sweep.stopped:
        found.append(
            f"stopped early: {terminal_text.one_line(sweep.stopped)}; run it again then; with --write it goes on where it ended"
        )
    return found


def _source(sweep: Sweep) -> str:
    if sweep.online:
        return f"asked {sweep.day}"
    days = [each.now.checked for each in sweep.threads if each.now and not each.now.final]
    if not days:
        return "from saved answers"
    return f"from saved answers, the oldest of {min(days)}, {(sweep.day - min(days)).days} days ago"


def data(sweep: Sweep) -> dict[str, Any]:
    """Return the report for machines."""
    return {
        "day": sweep.day.isoformat(),
        "online": sweep.online,
        "clean": sweep.clean,
        "stopped": sweep.stopped,
        "threads": [_thread(sweep, each) for each in sweep.threads],
        "retirement": [
            {
                "overlay": each.overlay.id if each.overlay else None,
                "pack": each.pack,
                "retire_when": each.overlay.retire_when if each.overlay else None,
                "threads": [str(one.waiting) for one in each.landed],
                "released": each.released,
                "next": each.steps(),
            }
            for each in candidates(sweep)
        ],
    }


def _thread(sweep: Sweep, each: SweptThread) -> dict[str, Any]:
    return {
        "repository": each.waiting.key[0],
        "number": each.waiting.key[1],
        "overlays": [overlay.id for overlay in each.waiting.overlays],
        "packs": [pack.number for pack in each.waiting.packs],
        "answer": to_json(each.now) if each.now else None,
        "age_days": (sweep.day - each.now.checked).days if each.now else None,
        "news": each.news,
        "landed": each.landed,
        "failure": each.failure,
        "contradictions": [
            {"where": declared.where, "declared": declared.state, "wrong": wrong}
            for declared, wrong in each.contradictions()
        ],
    }
