"""Suggestions for a misspelt name, for the end of an error message: at most three names, compared without case."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from difflib import get_close_matches

_MOST = 3
"""Names in one suggestion; if more are equally near, only the shortest is suggested."""
_LEAST_INSIDE = 3
"""Letters of a word that is searched inside names; a shorter one is in almost every name."""
_MOST_LISTED = 8
"""Known names that a message lists in full. A longer list would hide the sentence before it."""


def suggestion(word: str, known: Sequence[str], meant: str = "", where: str = "") -> str:
    """Return `did you mean scale-pad? known: ...` for an unknown word, without the list of names if it would be long.

    Names that begin with the word come before names that contain it, and those before names of a similar spelling. Case does
    not count, nor does the difference between `-` and `_`.

    Args:
        word: the name that was given.
        known: all known names.
        meant: the intended name, if it is known.
        where: the document that lists all names, for a long list: `docs/settings.md`.
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
    # A prefix that all names share says nothing about their distance, so it is left out.
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(word, *known, strict=False))
    common = sum(1 for _ in alike) if len(known) > 1 else 0
    tail = word[common:]
    close = [name for name in known if name.startswith(word)]
    close = close or [name for name in known if len(tail) >= _LEAST_INSIDE and tail in name]
    for length, cutoff in ((None, 0.6), (len(word), 0.7)):  # spelt like a whole name, or else like the beginning of one
        tails = {name[common:length]: name for name in known}
        close = close or [tails[each] for each in get_close_matches(tail, tails, n=1, cutoff=cutoff)]
    return close
