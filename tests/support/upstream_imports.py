"""Modules of an upstream, imported where warnings are errors."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def upstream_module(name: str) -> ModuleType:
    """Import a module of an upstream without its warnings, which are not under test: Megatron warns of packages that are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
