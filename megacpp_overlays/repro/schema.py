"""Validator of plain data for the few keywords of JSON Schema that the manifest's schema uses.

The schema is then the one description of the manifest, and a check needs no installed library. A keyword that is not known
here is an error, never ignored; a test compares this validator with the `jsonschema` library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "null": type(None),
}
_ANNOTATIONS = {"$schema", "$defs", "title"}


def problems(data: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return the problems of the data, one line each, with the place in the data.

    Raises:
        ValueError: the schema has a keyword that is not known here.
    """
    return list(_problems(data, schema, schema, "manifest"))


def _problems(data: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str) -> Iterator[str]:
    for keyword, value in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        match keyword:
            case "$ref":
                yield from _problems(data, root["$defs"][value.removeprefix("#/$defs/")], root, place)
            case "anyOf":
                answers = [list(_problems(data, choice, root, place)) for choice in value]
                if all(answers):
                    yield from answers[-1]
            case "type":
                if not isinstance(data, _TYPES[value]) or (value == "integer" and isinstance(data, bool)):
                    yield f"{place}: {data!r} is no {value}"
            case "const" | "enum":
                allowed = [value] if keyword == "const" else value
                if not any(data == choice and type(data) is type(choice) for choice in allowed):
                    yield f"{place}: {data!r} is none of {', '.join(map(repr, allowed))}"
            case "pattern" | "minLength":
                if isinstance(data, str) and not _fits(data, keyword, value):
                    yield f"{place}: {data!r} does not fit {keyword} {value}"
            case "minimum":
                if isinstance(data, int) and data < value:
                    yield f"{place}: {data} is less than {value}"
            case "items":
                for number, item in enumerate(data if isinstance(data, list) else ()):
                    yield from _problems(item, value, root, f"{place}[{number}]")
            case "required":
                if isinstance(data, dict):
                    yield from (f"{place}: {name} is missing" for name in value if name not in data)
            case "properties" | "additionalProperties":
                if isinstance(data, dict):
                    yield from _members(data, keyword, schema, root, place)
            case _:
                raise ValueError(f"the schema uses {keyword}, which is not known here")


def _fits(text: str, keyword: str, value: Any) -> bool:
    # JSON Schema's patterns are JavaScript's, where `$` is the very end.
    return len(text) >= value if keyword == "minLength" else bool(re.search(value.replace("$", r"\Z"), text))


def _members(
    data: Mapping[str, Any], keyword: str, schema: Mapping[str, Any], root: Mapping[str, Any], place: str
) -> Iterator[str]:
    known = schema.get("properties", {})
    for name, item in data.items():
        if keyword == "properties" and name in known:
            yield from _problems(item, known[name], root, f"{place}.{name}")
        elif keyword == "additionalProperties" and name not in known:
            if schema[keyword] is False:
                yield f"{place}: {name} is not known"
            else:
                yield from _problems(item, schema[keyword], root, f"{place}.{name}")
