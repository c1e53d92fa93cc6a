"""Words of a shell script by command, with quotes removed and variables as they are written. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megacpp_overlays.frozen import NamedTuple

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_OPERATORS = frozenset({";", "&", "|"})
_BLANK = frozenset(" \t\r")
HEREDOC = "<<"
"""Placeholder for a here-document in a script, whose text is left out."""


class Command(NamedTuple):
    """One command, or an assignment; an array is one word for each of its items, between `NAME=(` and `)`."""

    words: tuple[str, ...]
    may_not_run: bool
    """Whether it follows `&&` or `||`."""


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a script.

    Raises:
        ValueError: a quote or a bracket is not closed.
    """
    words: list[str] = []
    is_array, may_not_run = False, False
    for piece in _tokens(text):
        if is_array:
            is_array = piece != ")"
            words += [] if piece == "\n" else [piece]
        elif piece == "\n" or piece[:1] in _OPERATORS or piece in {"(", ")"}:
            if words:
                yield Command(tuple(words), may_not_run)
            words, may_not_run = [], piece in {"&&", "||"}
        else:
            words.append(piece)
            is_array = piece.endswith("=(")
    if words:
        yield Command(tuple(words), may_not_run)


def _tokens(text: str) -> Iterator[str]:
    """Yield words, operators, brackets and ends of lines."""
    word: list[str] | None = None
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        if text.startswith("\\\n", at):
            at += 2
            continue
        piece, after = _quoted(text, at)
        if piece is not None:
            word = [*(word or ()), piece]
            at = after
            continue
        if char == "(" and word and word[-1].endswith("="):
            yield "".join([*word, "("])
            word = None
        elif char in _BLANK or char == "\n" or char in _OPERATORS or char in "()" or (char == "#" and word is None):
            if word is not None:
                yield "".join(word)
                word = None
            if char == "#":
                at = text.find("\n", at) if "\n" in text[at:] else end
                continue
            if char in _OPERATORS:
                after = at + 2 if text[at : at + 2] in {"&&", "||", ";;"} else at + 1
                yield text[at:after]
            elif char not in _BLANK:
                yield char
        else:
            word = [*(word or ()), char]
        at = after
    if word is not None:
        yield "".join(word)


def _quoted(text: str, at: int) -> tuple[str | None, int]:
    """Return the text of a quote, escape, here-document or expansion that begins here, and its end; None if none begins.

    Raises:
        ValueError: it does not end.
    """
    char, two = text[at], text[at : at + 2]
    if char == "\\":
        return text[at + 1 : at + 2], at + 2
    if char == "'":
        after = _position(text, "'", at + 1)
        return text[at + 1 : after], after + 1
    if char == '"':
        return _in_double_quotes(text, at)
    if char == "`":
        after = _position(text, "`", at + 1)
        return text[at : after + 1], after + 1
    if two in {"$(", "${"}:
        after = _closing(text, at + 1)
        return text[at:after], after
    if (document := _HEREDOC.match(text, at)) and text[at : at + 3] != "<<<":
        body = re.compile(rf"\n[ \t]*{document[2]}[ \t]*(?=\n|$)").search(text, document.end())
        if body is None:
            raise ValueError(f"the document {document[2]} has no end")
        line = text.find("\n", document.end())
        rest = text[document.end() : line].strip()
        return f"{HEREDOC} {rest}" if rest else HEREDOC, body.end()
    return None, at + 1


def _in_double_quotes(text: str, at: int) -> tuple[str, int]:
    found: list[str] = []
    here = at + 1
    while text[here : here + 1] != '"':
        if here >= len(text):
            raise ValueError("a double quote is not closed")
        if text[here] == "\\":
            found.append("" if text[here + 1 : here + 2] == "\n" else text[here + 1 : here + 2])
            here += 2
        elif text[here : here + 2] in {"$(", "${"}:
            after = _closing(text, here + 1)
            found.append(text[here:after])
            here = after
        else:
            found.append(text[here])
            here += 1
    return "".join(found), here + 1


def _closing(text: str, at: int) -> int:
    """Return where the bracket at a place is closed, behind it."""
    pair = {"(": ")", "{": "}"}[text[at]]
    depth = 0
    for number in range(at, len(text)):
        depth += (text[number] == text[at]) - (text[number] == pair)
        if not depth:
            return number + 1
    raise ValueError(f"a bracket {text[at]} is not closed")


def _position(text: str, char: str, start: int) -> int:
    if (found := text.find(char, start)) < 0:
        raise ValueError(f"a quote {char} is not closed")
    return found
