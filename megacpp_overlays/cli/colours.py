"""Coloured output on a terminal. Files, pipes and environments with NO_COLOR get plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megacpp_overlays.model import Decision
from megacpp_overlays.terminal_text import PlainStream

if TYPE_CHECKING:
    from megacpp_overlays.loader.overview import Line

_RED, _YELLOW, _GREEN, _CYAN = "1;31", "1;33", "1;32", "1;36"
_COLOURS = {
    Decision.CONFLICT.value: _RED,
    Decision.UNPROVED.value: _YELLOW,
    Decision.GATED.value: _YELLOW,
    Decision.ACTIVE.value: _GREEN,
    Decision.RETIRED.value: _CYAN,
}


def show(lines: Iterable[Line]) -> None:
    """Print lines; those about a decision in its colour where there are any (https://no-color.org)."""
    stream = sys.stdout
    for line in lines:
        colour = _COLOURS.get(line.about)
        if colour and isinstance(stream, PlainStream) and _has_colours(stream):
            stream.write_in_colour(line.text, colour)
            stream.write("\n")
        else:
            print(line.text)


def _has_colours(stream: PlainStream) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
