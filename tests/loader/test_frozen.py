"""Frozen records and named tuples behave like those of the standard library, which they replace at a lower cost."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import typing
from typing import ClassVar

import pytest

from megacpp_overlays.frozen import Frozen, FrozenValue, NamedTuple, replace


class Part(Frozen):
    """Record with a required field and a field with a default."""

    shared: ClassVar[str] = "not a field"

    id: str
    pack: int = 3


class Longer(Part):
    """Subclass that adds a field."""

    title: str


class Value(FrozenValue):
    """Record that is compared by its fields, and checks them."""

    id: str
    seen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.id:
            raise ValueError("an id is empty")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AsDataclass:
    """Dataclass that raises the expected errors."""

    id: str
    title: str
    threads: str
    pack: int = 3


class AsFrozen(Frozen):
    """Frozen record with the fields of `AsDataclass`."""

    id: str
    title: str
    threads: str
    pack: int = 3


def test_a_field_is_read_by_name_and_has_its_default_unless_given() -> None:
    longer = Longer(title="t", id="a")
    assert (longer.id, longer.pack, longer.title, longer.shared) == ("a", 3, "t", "not a field")
    assert repr(longer) == "Longer(id='a', pack=3, title='t')"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"id": "a"},
        {"id": "a", "title": "t"},
        {"id": "a", "title": "t", "threads": "", "retired": 1},
        {"shared": ""},
    ],
    ids=lambda given: " ".join(given) or "nothing",
)
def test_a_missing_or_unknown_field_raises_the_message_of_a_dataclass(given: dict[str, object]) -> None:
    with pytest.raises(TypeError) as expected:
        AsDataclass(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as refused:
        AsFrozen(**given)  # type: ignore[arg-type]
    assert str(refused.value) == str(expected.value).replace("AsDataclass", "AsFrozen")


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        Part("a")  # type: ignore[misc]


def test_a_field_cannot_be_set_or_deleted() -> None:
    part = Part(id="a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'id'"):
        part.id = "b"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'other'"):
        part.other = "b"  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'id'"):
        del part.id
    assert part.id == "a"


def test_a_record_is_compared_by_identity_and_a_value_by_its_fields() -> None:
    assert Part(id="a") != Part(id="a")
    assert Value(id="a") == Value(id="a", seen=())
    assert Value(id="a") != Value(id="a", seen=("x",))
    assert Value(id="a") != Part(id="a")
    assert {Value(id="a"), Value(id="a")} == {Value(id="a")}


def test_replace_returns_a_new_record_and_checks_it_again() -> None:
    before = Value(id="a", seen=("x",))
    after = replace(before, id="b")
    assert (before.id, after) == ("a", Value(id="b", seen=("x",)))
    with pytest.raises(ValueError, match="empty"):
        replace(before, id="")
    with pytest.raises(TypeError, match="unexpected keyword argument 'ids'"):
        replace(before, ids="b")  # type: ignore[call-arg]


def test_functions_of_dataclasses_accept_a_record() -> None:
    longer = Longer(title="t", id="a")
    fields = dataclasses.fields(longer)
    assert dataclasses.is_dataclass(Longer)
    assert [(each.name, each.default) for each in fields] == [
        ("id", dataclasses.MISSING),
        ("pack", 3),
        ("title", dataclasses.MISSING),
    ]
    assert dataclasses.asdict(longer) == {"id": "a", "pack": 3, "title": "t"}
    assert dataclasses.replace(longer, pack=4).pack == 4
    if sys.version_info >= (3, 13):
        assert copy.replace(longer, pack=4).pack == 4


def test_a_value_is_copied_and_pickled() -> None:
    value = Value(id="a", seen=("x",))
    assert [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))] == [value] * 3


class Place(NamedTuple):
    """Named tuple of this package."""

    file: str
    line: int = 1
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class PlaceOfTyping(typing.NamedTuple):
    """Named tuple of the standard library with the fields and the method of `Place`."""

    file: str
    line: int = 1
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@pytest.mark.parametrize(
    "expression",
    [
        'kind("a")',
        'kind("a", 2, 3)',
        'kind(file="a", column=4)',
        'kind("a", column=4)',
        'kind("a")._replace(line=7)',
        'kind._make(["a", 2, 3])',
        'kind("a")._asdict()',
        '[*kind("a")]',
        '(kind("a").file, kind("a").line, kind("a")[2])',
        'str(kind("a"))',
        'f"{kind(\'a\', 2)!r}".partition("(")[2]',
        'kind("a") == ("a", 1, None)',
        'hash(kind("a"))',
        'kind("a") < kind("b")',
        '{kind("a"): 1}[kind("a")]',
        'copy.deepcopy(kind("a", 2))',
        'pickle.loads(pickle.dumps(kind("a", 2)))',
        "kind._fields",
        "kind._field_defaults",
        "kind.__match_args__",
    ],
)
def test_a_named_tuple_behaves_like_one_of_the_standard_library(expression: str) -> None:
    found, expected = (eval(expression, {**globals(), "kind": kind}) for kind in (Place, PlaceOfTyping))
    assert found == expected


@pytest.mark.parametrize(
    ("error", "expression"),
    [
        (TypeError, "kind()"),
        (TypeError, 'kind("a", 1, 2, 3)'),
        (TypeError, 'kind("a", file="b")'),
        (TypeError, 'kind("a", row=1)'),
        (AttributeError, 'setattr(kind("a"), "line", 2)'),
        (AttributeError, 'setattr(kind("a"), "row", 2)'),
        (AttributeError, 'delattr(kind("a"), "line")'),
    ],
)
def test_a_named_tuple_refuses_the_same_arguments_as_one_of_the_standard_library(
    error: type[Exception], expression: str
) -> None:
    for kind in (Place, PlaceOfTyping):
        with pytest.raises(error):
            eval(expression, {"kind": kind})


def test_a_named_tuple_raises_the_message_of_the_standard_library() -> None:
    for given in ({}, {"file": "a", "row": 2}):
        with pytest.raises(TypeError) as expected:
            PlaceOfTyping(**given)
        with pytest.raises(TypeError) as refused:
            Place(**given)
        assert str(refused.value) == str(expected.value).replace("PlaceOfTyping", "Place")
