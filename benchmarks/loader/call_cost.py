"""Cost of counting the calls of a seam: calls with a counter against the same calls without one.

    make bench                                     writes benchmarks/results/call_cost.md
    python benchmarks/loader/call_cost.py          prints the same

Rounds take the two in turn, so that a slow moment of the host hits both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megacpp_overlays.runtime import calls

RESULT = Path(__file__).resolve().parents[1] / "results" / "call_cost.md"
CALLS = 200_000
ROUNDS = 15


def seam(x: Any, *, k: Any) -> Any:
    """Stand for a seam: the call alone is of interest."""
    return x


def measure() -> dict[str, list[float]]:
    """Return nanoseconds a call, by round."""
    counted, _ = calls.counting(seam)  # type: ignore[arg-type]
    ways: dict[str, Callable[..., Any]] = {"the seam": seam, "the seam, counting": counted}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds = timeit.timeit("way(1, k=2)", number=CALLS, globals={"way": way})
            found[name].append(seconds / CALLS * 1e9)
    return found


def page(found: dict[str, list[float]]) -> str:
    """Return the result as Markdown."""
    rows = [f"| {name} | {min(each):.0f} | {statistics.median(each):.0f} |" for name, each in found.items()]
    least, median = (pick(found["the seam, counting"]) - pick(found["the seam"]) for pick in (min, statistics.median))
    return "\n".join(
        [
            "# Cost of counting the calls of a seam",
            "",
            f"Written by `make bench`. {ROUNDS} rounds of {CALLS:,} calls with one argument by position and one by name.",
            "",
            f"- Date: {datetime.now(timezone.utc):%Y-%m-%d}",
            f"- Host: {platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "",
            "| call | least ns | median ns |",
            "|---|---|---|",
            *rows,
            f"| difference | {least:.0f} | {median:.0f} |",
            "",
            "A compiled graph or a captured one has nothing of it inside.",
            "",
        ]
    )


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    text = page(measure())
    if parser.parse_args().write:
        RESULT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
