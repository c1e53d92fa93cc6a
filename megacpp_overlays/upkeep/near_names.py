"""The known name that somebody may have meant, for an error."""

from __future__ import annotations

from collections.abc import Collection


def suggestion(word: str, known: Collection[str]) -> str:
    """Return `did you mean scale_pad? known: ...` for a name that is not known."""
    from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]}? " if close else "") + f"known: {', '.join(known) or 'none'}"
