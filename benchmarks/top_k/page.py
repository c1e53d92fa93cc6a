"""The page of the measurements of top_k/run.py. Standard library only, so that any host can make it again.

python benchmarks/top_k/page.py FILE.json [--write FILE.md]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from report import NO_FIT, Found, main, ms, number, table, whole

FLOOR = "a copy of as many bytes"


def markdown(found: Found) -> str:
    """Return the page."""
    lines = [
        "Written by `benchmarks/top_k/run.py`, in one run: medians of contestants that take turns. float32 scores, int64 positions.",
        "`choose` is `megacpp_overlays.kernels.top_k`: positions in ascending order, of equal scores the first ones. The floor is a copy",
        "that reads and writes as many bytes as reading the scores and writing the positions takes. Memory is the peak above that",
        "held before, the result included.",
    ]
    for each in found["shapes"]:
        lines += ["", f"## {each['name']}, {each['kind']}", "", *_table(each)]
        lines += ["", f"The chosen numbers are those of torch.topk: {'yes' if each['right'] else 'no'}."]
    return whole("The k largest of each row", found, lines)


def _table(each: Found) -> list[str]:
    floor = each["contestants"][FLOOR]
    rows = []
    for name, one in each["contestants"].items():
        if one is None:
            rows.append([name, NO_FIT, "", ""])
        else:
            times = number(one["ms"] / floor["ms"]) if floor else "-"
            rows.append([name, ms(one["ms"]), times, number(one.get("mib"), ".0f")])
    return table(["", "ms", "times the floor", "extra MiB"], rows)


if __name__ == "__main__":
    main("Make the page of a kept run again.", markdown)
