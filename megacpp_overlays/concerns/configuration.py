"""Configuration of a model and its run as plain data, with the meaning of a missing key."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from megacpp_overlays.frozen import NamedTuple


class _UnknownType:
    """Type of the value that nothing is known of."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _UnknownType()
"""A value that cannot be read, such as a variable of a shell that its environment sets."""

ARGUMENTS_OF_A_RUN = "arguments"
"""Entry among the names of configuration classes for the arguments that a run printed or kept."""
FEWEST_ARGUMENTS = 300
"""Arguments that a run has at least: 0.12.0 has 420, 0.19.2 has 630. Fewer are not all of them."""

Values = Mapping[str, tuple[object, ...]]
"""The values that a key may have, one where it is sure."""


class Vocabulary(enum.Enum):
    """Whose names the keys of a configuration are."""

    CONFIG = "fields of Megatron's configuration classes"
    ARGUMENTS = "arguments of Megatron-LM"
    TRANSFORMERS = "a model of transformers"


class Configuration(NamedTuple):
    """Values of configuration keys, read from a file or a process, for a model and its run.

    Only known values rule a feature out. So a parser that is in doubt omits a key, or gives it `UNKNOWN` as a further value.
    """

    origin: str
    """Source of the values, as a report names it."""
    vocabulary: Vocabulary
    values: Values = MappingProxyType({})
    has_defaults: bool = False
    """Whether an argument that is not there has Megatron-LM's default: all arguments of a run were read."""
    whole: frozenset[str] = frozenset()
    """Configuration classes all of whose fields were read, and `ARGUMENTS_OF_A_RUN` where all arguments were: a key that is not
    there is none of the release."""
    decided: Mapping[str, bool] = MappingProxyType({})
    """Features that were decided without keys, such as by the type of a model."""


def of_a_run(values: Values) -> frozenset[str]:
    """Return the value of `whole` for arguments: they are complete if there are at least `FEWEST_ARGUMENTS`."""
    return frozenset({ARGUMENTS_OF_A_RUN} if len(values) >= FEWEST_ARGUMENTS else ())


def possible(*alternatives: Values) -> dict[str, tuple[object, ...]]:
    """Return the possible values of keys if any of several records may hold.

    A key that a record lacks has the values of the other records.
    """
    found: dict[str, tuple[object, ...]] = {}
    for values in alternatives:
        for key, each in values.items():
            known = found.get(key, ())
            found[key] = (*known, *(value for value in each if not any(_is_same(value, one) for one in known)))
    return found


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are one, without asking an object of another library for its opinion."""
    return one is other or (type(one) is type(other) and isinstance(one, str | int | float) and one == other)
