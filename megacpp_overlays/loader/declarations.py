"""Lazily loaded declarations of all overlays and gates; a static list provides their ids and targets until then.

Most processes that import this package never import a target: tools, data workers, children of children. So arming loads
no declaration and no probe of an overlay. The first import of a target loads them, and so does every audit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.listed import LISTED, DeclarationSummary
from megacpp_overlays.model import Erratum, Gate, Overlay

_LIST = "loader/listed.py"
_OUT_OF_STEP = f"{_LIST} is not the list of the overlays that are there; run scripts/list_overlays.py, or install again"


class Declarations:
    """The overlays and gates of a session."""

    def __init__(self, errata: Sequence[Erratum] | None = None) -> None:
        """Hold the given declarations, or those of this package, which are loaded on first use."""
        self.listed = LISTED if errata is None else listed(errata)
        self.are_loaded = errata is not None
        if errata is not None:
            self.errata = tuple(errata)

    @functools.cached_property
    def errata(self) -> tuple[Erratum, ...]:
        """Every part of every overlay and gate, in order.

        Raises:
            RegistryError: the declarations do not fit together, or differ from the list.
        """
        errata = registry.load()
        if listed(errata) != self.listed:
            raise RegistryError(_OUT_OF_STEP)
        self.are_loaded = True
        return errata

    @functools.cached_property
    def overlays(self) -> tuple[Overlay, ...]:
        """The parts of overlays, which are decided when their target is imported."""
        return tuple(each for each in self.errata if isinstance(each, Overlay))

    @functools.cached_property
    def gates(self) -> tuple[Gate, ...]:
        """The gates, which are decided when torch is imported, or at the first target or audit."""
        return tuple(each for each in self.errata if isinstance(each, Gate))

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all overlays and gates."""
        return frozenset(each.id for each in self.listed)

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules whose import triggers an overlay."""
        return tuple(dict.fromkeys(name for each in self.listed if each.installs for name in each.targets))


def of(plugins: Sequence[str]) -> Declarations:
    """Return the declarations for a process: those of this package, and those of the named plugins.

    Raises:
        RegistryError: see `registry.load`. Declarations of a plugin, and those that the list lacks, are loaded at once.
        SettingsError: a named plugin is not installed.
    """
    as_listed = {each.id.replace("-", "_") for each in LISTED} == set(registry.built_in())
    return Declarations() if as_listed and not plugins else Declarations(registry.load(plugins))


def listed(errata: Sequence[Erratum]) -> tuple[DeclarationSummary, ...]:
    """Return the entries of the list for declarations, one for each id."""
    parts: dict[str, list[Erratum]] = {}
    for each in errata:
        parts.setdefault(each.id, []).append(each)
    return tuple(
        DeclarationSummary(
            name, every[0].installs, every[0].off_by_default, tuple(part.target.module for part in every)
        )
        for name, every in parts.items()
    )
