"""Reading code without importing it: source trees, fingerprints, versions of distributions."""

from megacpp_overlays.source.trees import (
    DirectoryTree,
    FunctionNode,
    InstalledTree,
    ModuleSource,
    ShippedFile,
    SourceTree,
    parameters,
    shipped,
)

__all__ = [
    "DirectoryTree",
    "FunctionNode",
    "InstalledTree",
    "ModuleSource",
    "ShippedFile",
    "SourceTree",
    "parameters",
    "shipped",
]
