"""Configurations as Megatron prints them: the `repr` of a configuration object, and the list of arguments at the head of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megacpp_overlays.concerns.configuration import UNKNOWN, Configuration, Values, Vocabulary, of_a_run, possible
from megacpp_overlays.concerns.plain_values import plain_value

_CONFIG = re.compile(r"\b(\w*Config)\((?=\s*\w+\s*=)")
_WHOLE = {
    "TransformerConfig": 150,
    "MLATransformerConfig": 150,
    "OptimizerConfig": 30,
    "DistributedDataParallelConfig": 20,
}
"""Configuration classes by how many fields their `repr` has at least, in 0.12.0 to 0.19.2: with fewer it is not all of it."""
_ARGUMENT = re.compile(r"(?:^|[\s:])([a-z][A-Za-z0-9_]*) \.{2,} ?(.*?)\s*$", re.MULTILINE)
_FEWEST = 10
"""Lines that make a list of arguments."""
_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


def is_repr(text: str) -> bool:
    """Return whether a text has the `repr` of a configuration object in it."""
    return _CONFIG.search(text) is not None


def is_printed_arguments(text: str) -> bool:
    """Return whether a text has a printed list of arguments in it."""
    return sum(1 for _ in _ARGUMENT.finditer(text)) >= _FEWEST


def from_repr(text: str, origin: str) -> Configuration:
    """Return the configuration of the configuration objects in a text.

    Raises:
        ValueError: one has no end.
    """
    found: dict[str, list[Values]] = {}
    for match in _CONFIG.finditer(text):
        name = match[1].removeprefix("MLA") if match[1] in _WHOLE else match[1]
        found.setdefault(name, []).append(_fields(match[1], text[match.end() :]))
    whole = {
        name for name, objects in found.items() if all(len(each) >= _WHOLE.get(name, len(each) + 1) for each in objects)
    }
    values = possible(*(each for objects in found.values() for each in objects))
    return Configuration(origin=origin, vocabulary=Vocabulary.CONFIG, values=values, whole=frozenset(whole))


def from_printed_arguments(text: str, origin: str) -> Configuration:
    """Return the configuration of a printed list of arguments."""
    values = possible(*({match[1]: (plain_value(match[2]),)} for match in _ARGUMENT.finditer(text)))
    return Configuration(origin=origin, vocabulary=Vocabulary.ARGUMENTS, values=values, whole=of_a_run(values))


def _fields(name: str, text: str) -> Values:
    """Return the fields of an object, from behind its opening bracket on."""
    values: dict[str, tuple[object, ...]] = {}
    for piece in _pieces(text):
        key, equals, value = piece.partition("=")
        if equals and key.strip().isidentifier():
            values[key.strip()] = (_value(value),)
    if name.startswith("MLA"):
        values.setdefault("multi_latent_attention", (True,))
    return values


def _value(text: str) -> object:
    """Return a value; an object without a literal, such as `torch.bfloat16`, is text."""
    text = text.strip()
    return UNKNOWN if text in {"", "..."} else plain_value(text)


def _pieces(text: str) -> Iterator[str]:
    """Yield the items between commas up to the closing bracket of the text.

    Raises:
        ValueError: there is no closing bracket.
    """
    open_ones: list[str] = []
    start, quote = 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            open_ones.append(_PAIRS[char])
        elif open_ones and char == open_ones[-1]:
            open_ones.pop()
        elif not open_ones and char in ",)":
            yield text[start:at]
            start = at + 1
            if char == ")":
                return
    raise ValueError("the text of a configuration object has no end")
