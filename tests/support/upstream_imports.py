"""Modules of an upstream, imported where warnings are errors."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def upstream_module(name: str) -> ModuleType:
    """Import a module of an upstream; what it warns of is not what is tested: Megatron tells what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
