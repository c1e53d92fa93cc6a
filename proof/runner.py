"""The runner of a proof: it measures subjects, judges their claims and reports progress."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from claims import Claim, Found, Outcome, Say, Subject, Verdict, Workplace
from processes import ProofError


def prove(
    subjects: Sequence[Subject],
    archives: Path,
    say: Say,
    *,
    quick: bool,
    on_gpu: bool = False,
    checkout: Path | None = None,
    ranks: int = 1,
    keep: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Return the measurements, the outcome of each claim, and the problems.

    `keep` is called with as much of that as there is after each subject: the next one may be cut off.
    """
    measured: Found = {}
    judged: list[Found] = []
    problems: list[str] = []
    for subject in subjects:
        say(f"== {subject.title}: {len(subject.claims)} claims; {subject.takes}")
        with tempfile.TemporaryDirectory(prefix="proof-") as folder:
            try:
                measured[subject.id] = subject.measure(
                    Workplace(Path(folder), archives, quick, on_gpu, checkout, ranks), say
                )
            except ProofError as error:
                problems.append(str(error))
                say(f"error: {error}")
        found = measured.get(subject.id)
        for claim in subject.claims:
            if found is not None and not claim.asked(found):
                say(f"left out: {claim.says}")
                continue
            verdict = judge(claim, found)
            judged.append(
                {"id": claim.id, "says": claim.says, "outcome": verdict.outcome.value, "figure": verdict.figure}
            )
        keep({"measured": measured, "claims": judged, "problems": problems})
    return {"measured": measured, "claims": judged, "problems": problems}


def judge(claim: Claim, found: Found | None) -> Verdict:
    """Return the verdict on a claim; a claim without a measurement fails."""
    if found is None:
        return Verdict(Outcome.FAILS, "not measured: see the error")
    return claim.judge(found)


def summary(claims: Sequence[Found]) -> str:
    """Return the claims as a table for a terminal, and how many came out in each way."""
    width = max(len(claim["id"]) for claim in claims)
    lines = []
    for claim in claims:
        lines += [
            f"{claim['outcome']:8}  {claim['id']:{width}}  {claim['says']}",
            f"{'':{10 + width}}  {claim['figure']}",
        ]
    counts = ", ".join(f"{sum(claim['outcome'] == each.value for claim in claims)} {each.value}" for each in Outcome)
    return "\n".join([*lines, "", counts])


def exit_code(claims: Sequence[Found]) -> int:
    """Return 1 where a claim fails, or where there is none."""
    return int(not claims or any(claim["outcome"] == Outcome.FAILS.value for claim in claims))
