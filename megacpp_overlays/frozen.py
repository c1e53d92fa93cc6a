"""Frozen records of named fields: what frozen dataclasses are, without writing and compiling methods for each class.

To make the few classes that arming needs as dataclasses, and to import `dataclasses` for them, was a quarter of what an
import of this package costs. These behave alike: fields are given by name, a field without a default must be given, no
field can be set or deleted afterwards, subclasses add fields, type checkers check construction, and `dataclasses.fields`
and `dataclasses.replace` take them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import Field
    from dataclasses import replace as replace  # a checker knows it and checks what is given to it

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_) -> Any:
        """Return what leaves a class as it is: it is there for type checkers alone."""
        return lambda cls: cls

    def replace(record, /, **changes) -> Any:
        """Return a record like this one but for the fields that are given; the same as `dataclasses.replace`."""
        return record.__replace__(**changes)


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
            self._refuse(values)
        # An instance refuses to be changed by assignment, so this goes past it.
        vars(self).update({name: values[name] for name in self._kinds})
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the fields together; for subclasses."""

    def _refuse(self, values: dict[str, Any]) -> NoReturn:
        function = f"{type(self).__name__}.__init__()"
        for name in values:
            if name not in self._kinds:
                raise TypeError(f"{function} got an unexpected keyword argument {name!r}")
        missing = [repr(name) for name in self._kinds if name not in values]
        *others, last = missing
        names = f"{', '.join(others)}{',' if len(others) > 1 else ''} and {last}" if others else last
        plural = "s" if others else ""
        raise TypeError(f"{function} missing {len(missing)} required keyword-only argument{plural}: {names}")

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
