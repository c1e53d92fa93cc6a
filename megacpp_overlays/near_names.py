"""The known name that somebody may have meant, for an error."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from difflib import get_close_matches

_MOST = 4
"""Names in one suggestion; of more that are as near, the shortest stands for all."""


def suggestion(word: str, known: Sequence[str], meant: str = "") -> str:
    """Return `did you mean scale-pad? known: ...` for a word that is not known.

    Names that begin with it come before names that contain it, and those before names that are spelt alike.

    Args:
        word: what was given.
        known: all names that there are.
        meant: what the word stands for, where that is known.
    """
    close = [meant] if meant else _near(word, known)
    if len(close) > _MOST:
        close = [min(close, key=len)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


def _near(word: str, known: Sequence[str]) -> list[str]:
    # What all have in common tells nothing about which of them is near.
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(word, *known, strict=False))
    common = sum(1 for _ in alike) if len(known) > 1 else 0
    tail = word[common:]
    close = [name for name in known if name.startswith(word)]
    close = close or [name for name in known if tail and tail in name]
    for length in (None, len(word)):  # spelt like a whole name, or else like the beginning of one
        tails = {name[common:length]: name for name in known}
        close = close or [tails[each] for each in get_close_matches(tail, tails, n=1)]
    return close
