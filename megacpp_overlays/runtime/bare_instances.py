"""Instances that no constructor has seen, for self-tests that run one method of a class on a few attributes."""

from __future__ import annotations

from typing import Any


def bare(cls: type[Any], **attributes: Any) -> Any:
    """Return an instance of a class with these attributes and no others.

    Helpers and properties that the method calls are found on the class, as they are in a release that moved code to them.

    Args:
        cls: a class without abstract methods; a `torch.nn.Module` as well.
        attributes: the attributes that the method reads. A function replaces the method of its name, and gets no instance.

    Raises:
        TypeError: the class has abstract methods.
    """
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made
