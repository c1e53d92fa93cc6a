"""One launch of Megatron-LM's own `pretrain_hybrid.py`: how it is started, how it ended, and how its log is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import Found, Workplace
from megatron_checkout import LAUNCHER, WAY_OUT, Checkout, copied
from megatron_sizes import Sizes, sizes
from processes import RUN, EndedError, ProofError, start
from upstream_tests import LAUNCHERS, calls

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Site:
    """The checkout, sizes and folder that the launches of one measurement share."""

    checkout: Checkout
    sizes: Sizes
    folder: Path
    """For audits and checkpoints."""

    def about(self) -> Found:
        """Return the fields of the receipts about it."""
        checkout = self.checkout
        return {
            "checkout": {"version": checkout.version, "commit": checkout.commit, LAUNCHER: checkout.launcher_sha256},
            "host": self.sizes.host,
            "pattern": self.sizes.pattern,
            "arguments": list(self.sizes.arguments),
        }


def prepared(place: Workplace) -> Site:
    """Copy the checkout and choose the sizes of this host.

    Raises:
        ProofError: no checkout was given, or it is none.
    """
    if place.checkout is None:
        raise ProofError(f"no checkout of Megatron-LM was given: {WAY_OUT}")
    copy = place.folder / "checkout"
    copy.mkdir()
    return Site(copied(place.checkout, copy), sizes(quick=place.quick), place.folder)


def launched(
    site: Site,
    name: str,
    words: Sequence[str],
    *,
    overlays: bool,
    switches: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Found:
    """Run the launcher once and return its log, and with overlays its decisions.

    Args:
        site: where.
        name: of the launch; its audit has it.
        words: arguments behind those of the sizes, which they override.
        overlays: whether it is started by `megacpp_overlays run`.
        switches: variables of overlays.
        ranks: how many torchrun starts.

    Raises:
        EndedError: it ended badly.
        ProofError: it logged no step.
    """
    audit = site.folder / (re.sub(r"\W+", "-", name) + ".audit.json")
    command: list[str | Path] = [*RUN, "--audit", audit, "--verify-ranks"] if overlays else []
    command += [*TORCHRUN, str(ranks), site.checkout.folder / LAUNCHER, *site.sizes.arguments, *words]
    path = [*site.sizes.path, LAUNCHERS, site.checkout.folder]
    text = start(command, {**site.sizes.env, **(switches or {})}, path=path, cwd=site.checkout.folder)
    logged = steps(text)
    if not logged:
        raise ProofError(f"{name}: {LAUNCHER} logged no step")
    found: Found = {kept: [each[key] for each in logged] for kept, key in LOGGED.items()}
    found |= {"peak_mib": peak_mib(text), "graphs": graphs(text)}
    return {**found, **(decided(json.loads(audit.read_text())) if overlays else {})}


def tried(
    site: Site, name: str, words: Sequence[str], *, overlays: bool, switches: Mapping[str, str] | None = None
) -> Found:
    """Do the same where a bad end is one of the answers: return its cause as `error`, and how many steps it logged."""
    try:
        return launched(site, name, words, overlays=overlays, switches=switches)
    except EndedError as error:
        return {"error": cause(error.wrote), "steps": len(steps(error.wrote))}


def cause(text: str) -> str:
    """Return the last exception of a traceback, without the rank in front; where it says nothing, the line that raised it."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).rstrip() for line in text.splitlines()[-LAST:]]
    raised = [place for place, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not raised:
        return lines[-1] if lines else "it wrote nothing"
    said = lines[raised[-1]]
    places = [re.match(r'  File "(.*)", line (\d+), in', line) for line in lines[: raised[-1]]]
    if said.isidentifier() and (frames := [place for place, found in enumerate(places) if found]):
        file, number = places[frames[-1]].groups()  # type: ignore[union-attr]
        said += f" at {Path(file).name}:{number}: {lines[frames[-1] + 1].strip()}"
    return said


LAST = 60
"""Lines in which a cause is looked for: an error that was raised long before the end was caught."""
OUT_OF_MEMORY = ("torch.OutOfMemoryError:", "torch.cuda.OutOfMemoryError:", "CUDA error: out of memory")


def is_out_of_memory(error: str) -> bool:
    """Whether a cause is that the device had no more memory."""
    return any(sign in error for sign in OUT_OF_MEMORY)


LOGGED = {
    "iterations": "iteration",
    "losses": "lm loss",
    "norms": "grad norm",
    "skipped": "number of skipped iterations",
    "nans": "number of nan iterations",
    "ms": "elapsed time per iteration (ms)",
}
"""The numbers that are kept of a step, by their names in Megatron's log."""


def steps(text: str) -> list[dict[str, float]]:
    """Return the steps of a log, each with the numbers that its line names."""
    found = []
    for line in text.splitlines():
        if not (begin := re.search(r"\biteration +(\d+)/ *\d+ \|", line)):
            continue
        pairs = (each.rpartition(":") for each in line[begin.end() :].split("|"))
        step = {name.strip(): float(value) for name, _, value in pairs if name.strip()}
        found.append({"iteration": float(begin[1]), **step})
    return found


def peak_mib(text: str) -> float:
    """Return the most memory of a device that a log speaks of, in MiB, which Megatron calls MB."""
    return max((float(each) for each in re.findall(r"\bmax allocated: ([\d.]+)", text)), default=0.0)


def graphs(text: str) -> int:
    """Return how many CUDA graphs were captured, as a log or its bar of progress says it."""
    built = re.findall(r"> built (\d+) cuda graph", text) or re.findall(
        r"create cuda graphs[^\r\n]*\b(\d+)/\1 \[", text
    )
    return max(map(int, built), default=0)


def decided(audit: Found) -> Found:
    """Return the content of an audit: decisions, calls of the active overlays, and whether ranks agreed."""
    decisions: Sequence[Found] = audit["decisions"]
    return {
        "decisions": {each["id"]: each["decision"] for each in decisions},
        "calls": calls(decisions),
        "ranks": audit.get("ranks"),
    }


def ended(run: Found) -> str:
    """Return in words how a launch ended."""
    return run.get("error") or f"loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}"
