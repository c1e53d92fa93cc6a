"""Marks for parameters that stay in fp32 when Megatron casts a model to half precision.

A model author marks parameters in one of three ways, from the narrowest to the widest:

    keep_in_fp32(self.A_log)                          one parameter, in the constructor of its module
    @keeps_in_fp32("A_log", "D")                      every instance of a class, subclasses included
    declare("package.module.Mixer", "A_log", "D")     the same for a class that cannot be edited

The first sets the attribute `keep_in_fp32`, which Megatron's main branch honours by itself since 2026-08; such
a mark outlives this package. The other two need the overlay `float16-fp32-exemption`, on any Megatron: once it
retires they have no effect, so prefer the mark where the class is yours.

Only parameters that are fp32 when the model is wrapped are kept: the exemption saves bits, it does not make them.
Standard library only; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.frozen import NamedTuple

Parameter = TypeVar("Parameter")
Class = TypeVar("Class", bound=type)

MARK = "keep_in_fp32"
"""The attribute that marks a parameter; its name is Megatron's."""

MAMBA3 = "mamba_ssm.modules.mamba3.Mamba3"
MAMBA3_ALWAYS = ("dt_bias", "D", "B_bias", "C_bias")
MAMBA3_MIMO = ("mimo_x", "mimo_z", "mimo_o")
"""Mamba-3 creates these in fp32 for every `dtype`, and its kernels declare them as fp32 (mamba-ssm
2.3.2.post1, `modules/mamba3.py`). The second set is only there with `is_mimo=True`."""

_ON_CLASS = "__keeps_in_fp32__"


class Declaration(NamedTuple):
    """Parameter names of one class."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    def plus(self, other: Declaration) -> Declaration:
        """Return the union of two declarations."""
        return Declaration(self.required | other.required, self.optional | other.optional)


_by_name: dict[str, Declaration] = {MAMBA3: Declaration(frozenset(MAMBA3_ALWAYS), frozenset(MAMBA3_MIMO))}


def keep_in_fp32(parameter: Parameter) -> Parameter:
    """Mark one parameter, and return it: `self.D = keep_in_fp32(torch.nn.Parameter(...))`.

    Mark it after the last copy: `copy.deepcopy` of a parameter does not keep attributes.

    Raises:
        TypeError: not a parameter. Buffers are cast as upstream casts them.
    """
    # By name along the MRO, so that a launcher may import this module before torch.
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(parameter).__mro__}
    if "torch.nn.parameter.Parameter" not in bases and not getattr(parameter, "_is_param", False):
        raise TypeError(f"keep_in_fp32 takes a torch.nn.Parameter, not {type(parameter).__qualname__}")
    setattr(parameter, MARK, True)
    return parameter


def keeps_in_fp32(*names: str, optional: tuple[str, ...] = ()) -> Callable[[Class], Class]:
    """Declare parameters of the decorated class, by attribute name.

    Args:
        names: parameters that every instance has; wrapping a model fails where one is missing, because a
            misspelt name would lose its bits in silence.
        optional: parameters that only some instances have. A subclass uses this to relax the requirements of a base.

    Raises:
        TypeError: no name was given.
    """
    declaration = _declaration(names, optional)

    def decorate(cls: Class) -> Class:
        setattr(cls, _ON_CLASS, vars(cls).get(_ON_CLASS, Declaration()).plus(declaration))
        return cls

    return decorate


def declare(class_name: str, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Declare parameters of a class by its qualified name, `package.module.Class`; it is never imported.

    Several declarations of one class add up.

    Args:
        class_name: `cls.__module__` and `cls.__qualname__`, joined by a dot.
        names: see `keeps_in_fp32`.
        optional: see `keeps_in_fp32`.

    Raises:
        TypeError: no name was given.
    """
    _by_name[class_name] = _by_name.get(class_name, Declaration()).plus(_declaration(names, optional))


def declared_names(module: Any) -> frozenset[str]:
    """Return the names of a `torch.nn.Module` instance's own parameters that its classes declare.

    Raises:
        OverlayError: a required name is no parameter of this instance. One that is registered as None is there.
    """
    found = Declaration()
    for base in type(module).__mro__:
        found = found.plus(vars(base).get(_ON_CLASS, Declaration()))
        found = found.plus(_by_name.get(f"{base.__module__}.{base.__qualname__}", Declaration()))
    registered = module._parameters.keys() if found.required | found.optional else ()  # noqa: SLF001 - None included
    missing = sorted(found.required - found.optional - set(registered))
    if missing:
        raise OverlayError(
            f"{type(module).__module__}.{type(module).__qualname__} is declared to keep {', '.join(missing)} in fp32 "
            f"but has no such parameter; correct the declaration, name it as optional (megacpp_overlays.fp32_marks), "
            f"or set MEGACPP_OVERLAY_FLOAT16_FP32_EXEMPTION=off"
        )
    return (found.required | found.optional) & set(registered)


def _declaration(names: tuple[str, ...], optional: tuple[str, ...]) -> Declaration:
    if not names and not optional:
        raise TypeError("name at least one parameter")
    return Declaration(frozenset(names), frozenset(optional))
