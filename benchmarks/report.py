"""Shared parts of the pages of benchmarks: heads and ends, tables, numbers, and the command that makes one again.

Standard library only, so that any host can make a page from the numbers that were kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

NO_FIT = "does not fit"
"""Cell of a contestant that needs more memory than the device has."""

Found = dict[str, Any]
"""Measurements of a run, or a part of them, as they are kept in JSON."""


def main(description: str, markdown: Callable[[Found], str], svg: Callable[[Found], str] | None = None) -> None:
    """Make page and plot of a kept run: the command line of a page's module."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("json", type=Path)
    parser.add_argument("--write", type=Path, help="keep the page in this file")
    if svg:
        parser.add_argument("--plot", type=Path, help="keep the plot in this file, as SVG")
    chosen = parser.parse_args()
    publish(json.loads(chosen.json.read_text()), chosen, markdown, svg)


def keep(found: Found, path: Path | None) -> None:
    """Write the numbers so far, if a file is given."""
    if path:
        path.write_text(json.dumps(found, indent=2) + "\n")


def publish(
    found: Found,
    chosen: argparse.Namespace,
    markdown: Callable[[Found], str],
    svg: Callable[[Found], str] | None = None,
) -> None:
    """Print the page, which may link the plot by its name, `plot`; write the files that the command line asks for."""
    text = markdown(found | {"plot": chosen.plot.name} if svg and chosen.plot else found)
    print(text)
    if chosen.write:
        chosen.write.write_text(text)
    if svg and chosen.plot:
        chosen.plot.write_text(svg(found))


# --- parts of a page -------------------------------------------------------------------------------------------


def whole(title: str, found: Found, lines: Iterable[str]) -> str:
    """Return a page of one section, whose problems are tracebacks."""
    parts = [f"# {title}", "", *source(found), "", *lines]
    if found["problems"]:
        parts += ["", "## Problems", "", *(f"```\n{text}\n```" for text in found["problems"])]
    return "\n".join(parts) + "\n"


def source(found: Found, *more: str) -> list[str]:
    """Return the lines on date, host, versions and duration; further lines come after the host."""
    host, versions = found["host"], found["versions"]
    return [
        f"- Date: {found['date']}",
        f"- Host: {gpus(host)}, {host['machine']}, Python {host['python']}",
        *more,
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- The run took {found.get('seconds', 0):.0f} s",
    ]


def gpus(host: Found) -> str:
    """Return the device in words, with their number where a run may take several."""
    if "gpu" not in host:
        return "no GPU"
    if "gpus" in host:
        return f"{host['gpus']} x {host['gpu']}, driver {host['driver']}, {host['power_limit']}"
    return f"{host['gpu']}, driver {host['driver']}, power limit {host['power_limit']}"


def remarks(found: Found) -> list[str]:
    """Return the sections of notes and problems, where there are any."""
    lines = []
    for title in ("notes", "problems"):
        lines += ["", f"## {title.capitalize()}", "", *(f"- {line}" for line in found[title])] if found[title] else []
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def ms(value: float | None) -> str:
    """Return milliseconds with three digits that count, or a dash."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None, form: str = ".1f") -> str:
    """Return a number, or a dash."""
    return "-" if value is None else format(value, form)
