"""Suggestions for a misspelt name, at the end of an error: at most three, whatever case they were written in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from difflib import get_close_matches

_MOST = 3
"""Names in one suggestion; of more that are as near, the shortest stands for all."""
_LEAST_INSIDE = 3
"""Letters of a word that may be found inside of a name; fewer are in any."""
_MOST_LISTED = 8
"""Known names that are all listed. More of them would bury the sentence that they follow."""


def suggestion(word: str, known: Sequence[str], meant: str = "", where: str = "") -> str:
    """Return `did you mean scale-pad? known: ...` for a word that is not known, or no list where that would be long.

    Names that begin with it come before names that contain it, and those before names that are spelt alike. Case does not
    count, nor does the difference between `-` and `_`.

    Args:
        word: the name that was given.
        known: all names that there are.
        meant: the name that the word stands for, where that is known.
        where: what lists all names, where there are many: `docs/settings.md`.
    """
    close = [meant] if meant else _near(word, known)
    if len(close) > _MOST:
        close = [min(close, key=len)]
    hint = f"did you mean {' or '.join(close)}?" if close else ""
    if len(known) <= _MOST_LISTED:
        return f"{hint} known: {', '.join(known) or 'none'}".lstrip()
    listed = f" ({where} has them all)" if where else ""
    return hint or f"none of the {len(known)} known names is near{listed}"


def _near(word: str, known: Sequence[str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name in known:
        names.setdefault(_plain(name), []).append(name)
    return [name for each in _near_plain(_plain(word), list(names)) for name in names[each]]


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")


def _near_plain(word: str, known: Sequence[str]) -> list[str]:
    if word in known:
        return [word]
    # What all have in common tells nothing about which of them is near.
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(word, *known, strict=False))
    common = sum(1 for _ in alike) if len(known) > 1 else 0
    tail = word[common:]
    close = [name for name in known if name.startswith(word)]
    close = close or [name for name in known if len(tail) >= _LEAST_INSIDE and tail in name]
    for length, cutoff in ((None, 0.6), (len(word), 0.7)):  # spelt like a whole name, or else like the beginning of one
        tails = {name[common:length]: name for name in known}
        close = close or [tails[each] for each in get_close_matches(tail, tails, n=1, cutoff=cutoff)]
    return close
