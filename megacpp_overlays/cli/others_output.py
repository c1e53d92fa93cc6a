"""Capture of the output of other libraries during their import, separate from the output of a command."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections import Counter
from collections.abc import Iterator


class OthersOutput:
    """Lines and warnings of other libraries, each with its count."""

    def __init__(self) -> None:
        self._lines: Counter[str] = Counter()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Capture standard error and every warning in the block."""
        stream = io.StringIO()
        try:
            with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(stream):
                yield
        finally:
            self._lines.update(line for line in stream.getvalue().splitlines() if line.strip())
            self._lines.update(f"{each.category.__name__}: {each.message}".partition("\n")[0] for each in caught)

    def show(self, *, everything: bool) -> None:
        """Print the captured lines to standard error: all of them, or their number."""
        if not self._lines:
            return
        count = sum(self._lines.values())
        head = f"other libraries said {count} line{'s' if count > 1 else ''} while they were imported"
        if not everything:
            print(f"megacpp-overlays: {head}; `megacpp-overlays audit -v` prints them", file=sys.stderr)
            return
        print(f"megacpp-overlays: {head}:", file=sys.stderr)
        for line, number in self._lines.items():
            print(f"  | {line}{f' ({number} times)' if number > 1 else ''}", file=sys.stderr)
