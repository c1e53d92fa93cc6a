"""Frozen records of named fields: replacements of frozen dataclasses and named tuples that compile no code for each class.

The classes that an import of this package creates use them, at a tenth of the cost. Creating a dozen classes with
`dataclasses` and `typing.NamedTuple` took a third of the import time. The behaviour is the same. A `Frozen` record takes its
fields by name, and a field without a default must be given. No field can be set or deleted afterwards, subclasses add fields,
and `dataclasses.fields` and `dataclasses.replace` accept a record. A `NamedTuple` is a tuple with the methods of
`typing.NamedTuple`. Type checkers see frozen dataclasses and `typing.NamedTuple`.
"""

from __future__ import annotations

import inspect
import operator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from dataclasses import Field
    from dataclasses import replace as replace  # type checkers know these and check the arguments
    from typing import NamedTuple as NamedTuple

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_) -> Any:
        """Return a decorator that leaves a class unchanged; only type checkers use it."""
        return lambda cls: cls

    def replace(record, /, **changes) -> Any:
        """Return a copy of a record with the given fields changed, like `dataclasses.replace`."""
        return record.__replace__(**changes)

    class _TupleType(type):
        """Metaclass of named tuples: the annotations of a class are its fields, and its instances have no other attributes."""

        def __new__(mcs, name, bases, namespace) -> Any:
            cls = super().__new__(mcs, name, bases, {"__slots__": (), **namespace})
            if fields := tuple(inspect.get_annotations(cls)):
                cls._fields = cls.__match_args__ = fields
                cls._field_defaults = {each: namespace[each] for each in fields if each in namespace}
                for position, each in enumerate(fields):
                    setattr(cls, each, property(operator.itemgetter(position)))
            return cls

    class NamedTuple(tuple, metaclass=_TupleType):
        """Base class of named tuples, in place of `typing.NamedTuple`."""

        _fields = ()
        _field_defaults: ClassVar = {}

        def __new__(cls, /, *values, **named) -> Any:
            """Create a tuple from its fields, in order or by name.

            Raises:
                TypeError: a field is missing or given twice, or there is no field of that name or position.
            """
            if not named and len(values) == len(cls._fields):
                return tuple.__new__(cls, values)
            given = dict(zip(cls._fields, values, strict=False))
            function = f"{cls.__name__}.__new__()"
            if len(values) > len(cls._fields):
                raise TypeError(f"{function} takes {len(cls._fields)} fields but {len(values)} were given")
            if twice := [name for name in named if name in given]:
                raise TypeError(f"{function} got multiple values for argument {twice[0]!r}")
            given = {**cls._field_defaults, **given, **named}
            if given.keys() != set(cls._fields):
                _refuse(function, cls._fields, given, "positional")
            return tuple.__new__(cls, [given[name] for name in cls._fields])

        def __getnewargs__(self) -> Any:
            """Return the arguments of `__new__` for a copy."""
            return tuple(self)

        @classmethod
        def _make(cls, values) -> Any:
            return cls(*values)

        def _replace(self, /, **changes) -> Any:
            return type(self)(**{**self._asdict(), **changes})

        __replace__ = _replace

        def _asdict(self) -> Any:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"


def _refuse(function: str, fields: Collection[str], given: Collection[str], kind: str) -> NoReturn:
    for name in given:
        if name not in fields:
            raise TypeError(f"{function} got an unexpected keyword argument {name!r}")
    missing = [repr(name) for name in fields if name not in given]
    *others, last = missing
    names = f"{', '.join(others)}{',' if len(others) > 1 else ''} and {last}" if others else last
    raise TypeError(f"{function} missing {len(missing)} required {kind} argument{'s' if others else ''}: {names}")


_Self = TypeVar("_Self", bound="Frozen")


class _DataclassFields:
    """The fields as `dataclasses` describes them, created on first access; `dataclasses` accepts any class that has them."""

    def __get__(self, _record: object, cls: type[Frozen]) -> Mapping[str, Field[Any]]:
        import dataclasses  # noqa: PLC0415 - no launcher needs it

        described = [
            (name, kind, dataclasses.field(default=cls._defaults[name])) if name in cls._defaults else (name, kind)
            for name, kind in cls._kinds.items()
        ]
        made = dataclasses.make_dataclass(cls.__name__, described, kw_only=True)
        return {field.name: field for field in dataclasses.fields(made)}


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
class Frozen:
    """Base class of frozen records, compared by identity. The annotations of a subclass are its fields."""

    _kinds: ClassVar[dict[str, Any]] = {}
    """Every field in order, with its annotation."""
    _defaults: ClassVar[dict[str, Any]] = {}
    __match_args__: ClassVar[tuple[()]] = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __init_subclass__(cls) -> None:
        """Collect the fields of a subclass; those of its bases come first."""
        own = inspect.get_annotations(cls)
        kinds = {
            name: kind for name, kind in own.items() if not str(kind).startswith(("ClassVar[", "typing.ClassVar["))
        }
        cls._kinds = {**cls._kinds, **kinds}
        cls._defaults = {**cls._defaults, **{name: cls.__dict__[name] for name in kinds if name in cls.__dict__}}

    def __init__(self, **fields: Any) -> None:
        """Create a record from its fields, by name.

        Raises:
            TypeError: a field is missing, or there is no field of that name.
        """
        values = {**self._defaults, **fields}
        if values.keys() != self._kinds.keys():
            _refuse(f"{type(self).__name__}.__init__()", self._kinds, values, "keyword-only")
        # `__setattr__` refuses every assignment, so the fields are written into the instance dictionary.
        vars(self).update({name: values[name] for name in self._kinds})
        self.__post_init__()

    def __post_init__(self) -> None:
        """Validate the fields together; subclasses override it."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse the assignment: a record is replaced and not edited.

        Raises:
            dataclasses.FrozenInstanceError: always.
        """
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - no launcher needs it

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse the deletion, as for an assignment.

        Raises:
            dataclasses.FrozenInstanceError: always.
        """
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - no launcher needs it

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __replace__(self: _Self, /, **changes: Any) -> _Self:
        """Return a copy of this record with the given fields changed; `copy.replace` of newer Pythons calls it."""
        return type(self)(**{**vars(self), **changes})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"


class FrozenValue(Frozen):
    """Base class of frozen records, compared by their fields."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))
