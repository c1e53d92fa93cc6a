"""Calls of a method that reach a base's definition: through overrides that call it, and through no others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from megacpp_overlays.runtime.overrides import reaches


class Base:
    def method(self) -> str:
        return "base"


class Inherits(Base):
    pass


class BySuper(Inherits):
    def method(self) -> str:
        return super().method()


class ByName(BySuper):
    def method(self) -> str:
        return Inherits.method(self)


class OfItsOwn(BySuper):
    def method(self) -> str:
        return "own"


class CallsAnother(Base):
    def method(self) -> str:
        return super().__repr__()


class OnItsOwn(OfItsOwn):
    def method(self) -> str:
        return super().method()


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Decorated(Base):
    @hidden
    def method(self) -> str:
        return super().method()


class Replaced(Base):
    method = "no method"  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Base, Inherits, BySuper, ByName])
def test_an_override_that_calls_the_base_reaches_it(kind: type) -> None:
    assert reaches(kind, "method", lambda owner, _: owner is Base)


@pytest.mark.parametrize("kind", [OfItsOwn, CallsAnother, OnItsOwn, Decorated, Replaced, object])
def test_of_any_other_override_nothing_is_known(kind: type) -> None:
    assert not reaches(kind, "method", lambda owner, _: owner is Base)


def test_a_definition_may_be_chosen_by_its_attribute() -> None:
    assert reaches(BySuper, "method", lambda _, raw: raw is vars(Base)["method"])
    assert not reaches(BySuper, "other", lambda *_: True)
