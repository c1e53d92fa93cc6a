"""Made-up packs in a folder of their own: notes, facts, a reproducer, kept receipts and saved answers of upstream."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays.model import Overlay
from megacpp_overlays.repro import inventory, manifest, receipts
from megacpp_overlays.repro.stamp import Stamp
from megacpp_overlays.upkeep import pack_status
from megacpp_overlays.upkeep.pack_status import PackStatus
from megacpp_overlays.upkeep.sweep import threads

HOST = {"machine": "x86_64", "processor": "a CPU", "cpus": 2, "system": "Linux 6.1", "python": "3.12.1", "gpu": None}
REPRODUCER = """
from megacpp_overlays.repro import Behaviour, Case


def measure():
    from made_target import layers

    value = layers.double(1)
    return Behaviour(broken=value != 2, seen=f"double(1) = {value}")


CASES = (Case(name="double", overlay="double-fix", device="cpu", versions=("packaging",), run=measure),)
"""
SECTIONS = """\
## Target
made/up, `layers.double`.

## Problem
It adds one too many, see #1.
"""


def notes(kind: str, state: str) -> str:
    """Return the text of a README.md."""
    return f"# Pack 99: doubles\n\n| | |\n|---|---|\n| Class | {kind} |\n| Lifecycle state | {state} |\n\n{SECTIONS}"


@dataclass(frozen=True)
class Packs:
    """A folder of packs."""

    folder: Path
    overlays: tuple[Overlay, ...] = ()

    def write(
        self,
        number: int = 99,
        *,
        kind: str = "overlay",
        state: str = "draft",
        repository: str = "made/up",
        upstream: str = "new",
        priority: str = "crash",
        more: str = "",
        reproducer: str | None = REPRODUCER,
    ) -> Path:
        """Write one pack; return its folder."""
        pack = self.folder / f"{number:02}-double"
        pack.mkdir(parents=True, exist_ok=True)
        (pack / "README.md").write_text(notes(kind, state))
        facts = (
            f'repository = "{repository}"\nupstream = "{upstream}"\npriority = "{priority}"\nfiles = ["layers.py"]\n'
        )
        (pack / "pack.toml").write_text(facts + more)
        if reproducer is not None:
            (pack / "reproduce.py").write_text(reproducer)
        return pack

    def keep(self, number: int = 99, *sentinels: str) -> None:
        """Keep a receipt of a run that printed these words."""
        pack = inventory.find(self.folder, number)
        digest = inventory.digest(pack.reproducer)
        stamp = Stamp(host=HOST, versions={"made": "1"}, tree=None, reproducer=digest, date="2026-11-21")
        command = f"megacpp-overlays repro {number}"
        said = [f"{word}: double(1) = 3 (case double)" for word in sentinels]
        lines = (stamp.line(), f"$ {command}", "case double (overlay double-fix): cpu", *said, "exit code 0")
        entry = receipts.prepare(self.folder, pack, self.overlays)
        receipts.keep(self.folder, entry, pack, stamp, "".join(f"{line}\n" for line in lines), command)

    def ready(self, number: int = 99, **facts: Any) -> Path:
        """Write a pack that is ready to be sent: a bug report, unless it is said to be something else."""
        kind = facts.pop("kind", "bug report")
        pack = self.write(number, kind=kind, state="ready", **facts)
        self.keep(number, "BUG_REPRODUCED", *(["FIX_VALIDATED"] if kind != "bug report" else []))
        return pack

    def answer(self, number: int = 1, state: str = "open") -> None:
        """Save an answer of today about an upstream thread."""
        fields = dict.fromkeys(threads.Answer.__dataclass_fields__)
        fields |= {"repository": "made/up", "number": number, "state": state, "checked": today(), "source": "api"}
        new = threads.Answer(**fields)  # type: ignore[arg-type]
        old = [each for each in threads.read(self.folder).values() if each.key != new.key]
        threads.write(self.folder, [*old, new])

    def synchronise(self) -> None:
        """Bring the manifest in step."""
        manifest.write(self.folder, manifest.synchronise(self.folder, self.overlays))

    def status(self, number: int = 99) -> PackStatus:
        """Return the status of a pack, with a manifest that is in step."""
        self.synchronise()
        return next(each for each in pack_status.of_all(self.folder, self.overlays) if each.pack.number == number)


def thread(number: int = 1, repository: str = "made/up", state: str = "open") -> str:
    """Return a thread as pack.toml has it."""
    return f'[[threads]]\nrepository = "{repository}"\nnumber = {number}\nstate = "{state}"\n'


def today() -> datetime.date:
    """Return the day as the project counts days: in UTC, now and not when the tests began."""
    return datetime.datetime.now(datetime.timezone.utc).date()
