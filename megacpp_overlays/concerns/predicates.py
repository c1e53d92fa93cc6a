"""Predicates over features, with three values: `mla and tensor_parallel` of a configuration is yes, no or undecided.

A predicate is a text, so that a declaration costs nothing to import: names of `features`, `and`, `or`, `not` and parentheses.
No is said only where the configuration rules the predicate out. A name that is no feature, as a plugin may have, decides nothing.
"""

from __future__ import annotations

import ast
import enum
import functools
import math
from collections.abc import Iterable

from megacpp_overlays.concerns.configuration import ARGUMENTS_OF_A_RUN, UNKNOWN, Configuration, Vocabulary
from megacpp_overlays.concerns.features import BY_NAME, EVERYTHING, PROGRAM, Criterion, Feature, Sign
from megacpp_overlays.errors import RegistryError


class Ternary(enum.Enum):
    """The value of a predicate."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"

    @property
    def concerns(self) -> bool:
        """Whether the model is taken to be concerned."""
        return self is not Ternary.NO


_ORDER = (Ternary.NO, Ternary.UNDECIDED, Ternary.YES)


def of_predicate(text: str, configuration: Configuration) -> Ternary:
    """Return the value of a predicate; that of an empty one is undecided.

    Raises:
        RegistryError: it is no expression of names with and, or, not and parentheses.
    """
    if text == EVERYTHING:
        return Ternary.YES
    return _value(_parsed(text), configuration) if text else Ternary.UNDECIDED


def features_of(text: str) -> tuple[str, ...]:
    """Return the names in a predicate, in order.

    Raises:
        RegistryError: see `of_predicate`.
    """
    if text in {"", EVERYTHING}:
        return ()
    return tuple(dict.fromkeys(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)))


def because(text: str, configuration: Configuration) -> tuple[str, ...]:
    """Return the features that a no, or an undecided, rests on, as a report has them; none for yes.

    Raises:
        RegistryError: see `of_predicate`.
    """
    if text in {"", EVERYTHING} or (answer := of_predicate(text, configuration)) is Ternary.YES:
        return ()
    return tuple(dict.fromkeys(_reasons(_parsed(text), configuration, answer)))


def _reasons(node: ast.expr, configuration: Configuration, answer: Ternary) -> list[str]:
    """Return the features that give an expression the value that it has; of several that would each do, the first."""
    if isinstance(node, ast.BoolOp):
        found = [_reasons(each, configuration, answer) for each in node.values if _value(each, configuration) is answer]
        is_enough = answer is (Ternary.NO if isinstance(node.op, ast.And) else Ternary.YES)
        return found[0] if is_enough else [name for names in found for name in names]
    if isinstance(node, ast.UnaryOp):
        return _reasons(node.operand, configuration, _ORDER[-1 - _ORDER.index(answer)])
    name = node.id if isinstance(node, ast.Name) else ""
    title = BY_NAME[name].title if name in BY_NAME else name
    return [f"no {title}" if answer is Ternary.NO else title]


def of_feature(feature: Feature, configuration: Configuration) -> Ternary:
    """Return whether a model has a feature."""
    if (decided := configuration.decided.get(feature.name)) is not None:
        return Ternary.YES if decided else Ternary.NO
    signs = {Vocabulary.CONFIG: feature.config, Vocabulary.ARGUMENTS: feature.arguments}
    values = [_of_sign(sign, configuration) for sign in signs.get(configuration.vocabulary, ())]
    shown = [_of_sign(sign, configuration) for sign in feature.shows if sign.key in configuration.values]
    if Ternary.YES in values or Ternary.YES in shown:
        return Ternary.YES
    return Ternary.NO if values and {*values, *shown} == {Ternary.NO} else Ternary.UNDECIDED


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _no_predicate(text) from error
    allowed = ast.BoolOp | ast.UnaryOp | ast.Name | ast.And | ast.Or | ast.Not | ast.Load
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise _no_predicate(text)
    return tree


def _no_predicate(text: str) -> RegistryError:
    return RegistryError(f"{text!r} is no predicate: it takes names of features, `and`, `or`, `not` and parentheses")


def _value(node: ast.expr, configuration: Configuration) -> Ternary:
    if isinstance(node, ast.BoolOp):
        values = [_value(each, configuration) for each in node.values]
        return (min if isinstance(node.op, ast.And) else max)(values, key=_ORDER.index)
    if isinstance(node, ast.UnaryOp):
        return _ORDER[-1 - _ORDER.index(_value(node.operand, configuration))]
    feature = BY_NAME.get(node.id) if isinstance(node, ast.Name) else None
    return of_feature(feature, configuration) if feature else Ternary.UNDECIDED


def _of_sign(sign: Sign, configuration: Configuration) -> Ternary:
    """Return the answer of a key; undecided if its possible values give different answers."""
    values = configuration.values.get(sign.key)
    if values is None:
        owner = sign.of if configuration.vocabulary is Vocabulary.CONFIG else ARGUMENTS_OF_A_RUN
        if owner in configuration.whole and sign.key != PROGRAM:
            return Ternary.NO  # the release has no such key, and so no such feature
        values = sign.default if configuration.has_defaults else ()
    found = {_of_value(sign, value) for value in values}
    return found.pop() if len(found) == 1 else Ternary.UNDECIDED


def _of_value(sign: Sign, value: object) -> Ternary:
    if value is UNKNOWN:
        return Ternary.UNDECIDED
    if value is None and sign.criterion is not Criterion.ONE_OF:
        return Ternary.NO
    if sign.criterion is Criterion.GIVEN:
        return Ternary.YES
    if sign.criterion is Criterion.TRUE:
        return _answer(value) if isinstance(value, bool) else Ternary.UNDECIDED
    if sign.criterion in {Criterion.COUNT, Criterion.SEVERAL}:
        least = 0 if sign.criterion is Criterion.COUNT else 1
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            return Ternary.UNDECIDED
        return _answer(value > least)
    if sign.criterion is Criterion.HAS:
        return _has(value, sign.on)
    if sign.criterion is Criterion.ONE_OF:
        word = _word(value)
        return Ternary.YES if word in sign.on else Ternary.NO if word in sign.off else Ternary.UNDECIDED
    return Ternary.UNDECIDED


def _word(value: object) -> object:
    """Return a value as a configuration file has it: a member of an enumeration, and a dtype of torch, are texts there."""
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if type(value).__module__ == "torch" else value


def _has(value: object, words: Iterable[object]) -> Ternary:
    """Return whether a text has one of some texts in it, or a list one of some words."""
    if isinstance(value, list | tuple):
        texts = [each for each in value if isinstance(each, str)]
        return _answer(any(word in texts for word in words)) if len(texts) == len(value) else Ternary.UNDECIDED
    return _answer(any(str(word) in value for word in words)) if isinstance(value, str) else Ternary.UNDECIDED


def _answer(is_on: object) -> Ternary:
    return Ternary.YES if is_on else Ternary.NO
