"""The page of the measurements of run.py. Standard library only, so that any host can make it again.

python benchmarks/dsa_ranks/page.py FILE.json [--write FILE.md]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from report import NO_FIT, Found, main, ms, number, table, whole

TITLE = "A layer of DeepSeek sparse attention on context-parallel ranks"
COLUMNS = (
    "ranks",
    "tokens",
    "tokens of a rank",
    "forward and backward, ms",
    "peak of a rank, GiB",
    "steps",
    "first loss",
    "last",
)


def markdown(found: Found) -> str:
    """Return the page."""
    return whole(TITLE, found, section(found))


def section(found: Found) -> Iterator[str]:
    """Yield the description of the model, tables of times and memory, and how near gradients are to those of one rank."""
    size = found["size"]
    yield from [
        "Written by `benchmarks/dsa_ranks/run.py`, in one launch for each number of ranks. The model and its training are those of "
        "[by length](dsa_lengths.md), under overlays,",
        f"{size['heads']} heads, with `cp_comm_type=allgather`, the one that DSA takes: a rank has the queries of two of twice as many",
        f"chunks of the document as there are ranks, and keys of all tokens; {found['backend']}, NVLink multicast off. Milliseconds are medians of the later half of",
        "the steps, of the slowest rank; memory is above weights and optimizer, of the rank that has most.",
        "",
        *table(COLUMNS, rows(found)),
        "",
        "Gradients of a document, mean over ranks, against those of one rank that has all of it: norm of the difference over the norm. "
        "`rounding` is the same",
        "for one rank whose channels of hidden states are in another order, the same function. Where scores are that close, another key is chosen.",
        "",
        *table(("ranks", "dtype", "tokens", "parameter", "apart", "rounding"), gradient_rows(found)),
    ]


def rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield a row for each run."""
    for ranks, launch in found["ranks"].items():
        for each in launch["runs"]:
            losses = each["losses"]
            ends = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}") if losses else ("", "")
            memory = "" if each["mib"] is None else number(each["mib"] / 1024, ".2f")
            time = ms(each["ms"]) if losses else NO_FIT
            yield ranks, str(each["tokens"]), str(each["tokens"] // int(ranks)), time, memory, str(each["steps"]), *ends


def gradient_rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield a row for each parameter of each comparison, those that are furthest apart first."""
    for ranks, launch in found["ranks"].items():
        for dtype, each in launch["gradients"].items():
            for name in sorted(each["ranks"], key=lambda name, apart=each["ranks"]: -apart[name]):
                apart, rounding = (f"{each[key][name]:.1e}" for key in ("ranks", "rounding"))
                yield ranks, dtype, str(found["checked"][dtype]), f"`{name}`", apart, rounding


if __name__ == "__main__":
    main("Page of a layer of DeepSeek sparse attention on context-parallel ranks.", markdown)
