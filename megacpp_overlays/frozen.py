"""Frozen records of named fields: frozen dataclasses and named tuples, without code that is compiled for each class.

What an import of this package makes is made of these, a tenth of the price: to make a dozen classes with `dataclasses` and
`typing.NamedTuple` was a third of what the import costs. They behave alike. Of a `Frozen` record fields are given by name,
a field without a default must be given, no field can be set or deleted afterwards, subclasses add fields, and
`dataclasses.fields` and `dataclasses.replace` take it. A `NamedTuple` is a tuple with the methods that it always has. Type
checkers take them for what they stand for.
"""

from __future__ import annotations

import inspect
import operator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from dataclasses import Field
    from dataclasses import replace as replace  # a checker knows these and checks what is given to them
    from typing import NamedTuple as NamedTuple

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_) -> Any:
        """Return what leaves a class as it is: it is there for type checkers alone."""
        return lambda cls: cls

    def replace(record, /, **changes) -> Any:
        """Return a record like this one but for the fields that are given; the same as `dataclasses.replace`."""
        return record.__replace__(**changes)

    class _TupleType(type):
        """Type of named tuples: the annotations of a class are its fields, and its instances have nothing beside them."""

        def __new__(mcs, name, bases, namespace) -> Any:
            cls = super().__new__(mcs, name, bases, {"__slots__": (), **namespace})
            if fields := tuple(inspect.get_annotations(cls)):
                cls._fields = cls.__match_args__ = fields
                cls._field_defaults = {each: namespace[each] for each in fields if each in namespace}
                for position, each in enumerate(fields):
                    setattr(cls, each, property(operator.itemgetter(position)))
            return cls

    class NamedTuple(tuple, metaclass=_TupleType):
        """Base class of named tuples, as `typing.NamedTuple` is one."""

        _fields = ()
        _field_defaults: ClassVar = {}

        def __new__(cls, /, *values, **named) -> Any:
            """Take fields in order, or by name.

            Raises:
                TypeError: a field is missing or given twice, or there is none of that name or number.
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
            """Return what a copy is made of."""
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
    """The fields as `dataclasses` describes them, made when somebody asks: it takes for its own what has them."""

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
    """Base class of frozen records, which are equal to themselves alone. Annotations of a subclass are its fields."""

    _kinds: ClassVar[dict[str, Any]] = {}
    """Every field in order, with its annotation."""
    _defaults: ClassVar[dict[str, Any]] = {}
    __match_args__: ClassVar[tuple[()]] = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __init_subclass__(cls) -> None:
        """Read the fields of a subclass; those of its bases come first."""
        own = inspect.get_annotations(cls)
        kinds = {
            name: kind for name, kind in own.items() if not str(kind).startswith(("ClassVar[", "typing.ClassVar["))
        }
        cls._kinds = {**cls._kinds, **kinds}
        cls._defaults = {**cls._defaults, **{name: cls.__dict__[name] for name in kinds if name in cls.__dict__}}

    def __init__(self, **fields: Any) -> None:
        """Take every field by its name.

        Raises:
            TypeError: a field is missing, or there is none of that name.
        """
        values = {**self._defaults, **fields}
        if values.keys() != self._kinds.keys():
            _refuse(f"{type(self).__name__}.__init__()", self._kinds, values, "keyword-only")
        # An instance refuses to be changed by assignment, so this goes past it.
        vars(self).update({name: values[name] for name in self._kinds})
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the fields together; for subclasses."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a record is replaced and not edited.

        Raises:
            dataclasses.FrozenInstanceError: always.
        """
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - no launcher needs it

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse, as for assignment.

        Raises:
            dataclasses.FrozenInstanceError: always.
        """
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - no launcher needs it

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __replace__(self: _Self, /, **changes: Any) -> _Self:
        """Return a record like this one but for the fields that are given; `copy.replace` of newer Pythons asks it."""
        return type(self)(**{**vars(self), **changes})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"


class FrozenValue(Frozen):
    """Base class of frozen records that are equal when their fields are."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))
