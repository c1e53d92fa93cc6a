"""Reading code without importing it: source trees, fingerprints, versions of distributions."""

from typing import TYPE_CHECKING

from megacpp_overlays.source.trees import (
    FunctionNode,
    InstalledTree,
    ModuleSource,
    ShippedFile,
    SourceTree,
    parameters,
    shipped,
)

if TYPE_CHECKING:
    from megacpp_overlays.source.file_trees import DirectoryTree

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

if not TYPE_CHECKING:  # a type checker must go on refusing names that are not here

    def __getattr__(name: str) -> object:
        if name != "DirectoryTree":
            raise AttributeError(f"module {__name__} has no attribute {name}")
        from megacpp_overlays.source.file_trees import DirectoryTree  # noqa: PLC0415 - no launcher needs it

        return DirectoryTree
