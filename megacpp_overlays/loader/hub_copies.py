"""Detection of upstream code that the package `kernels` has loaded from the Hugging Face Hub; it is named, never patched.

A kernel of the Hub is a folder of Python files under a module name of its own. `kernels-community/liger-kernels`, which
transformers loads with `use_kernels=True`, contains Liger's files. So a defect of Liger can be in a process that never imported
the target of an overlay. Overlays patch only modules of an installed distribution, and such a copy is not one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from megacpp_overlays.model import Erratum

PACKAGE = "kernels"
"""The distribution, and its module, that loads kernels of the Hub."""
_IN_A_CACHE = ("/models--", "/kernels--")
"""Folders of the Hub's cache, for releases of `kernels` that do not list the loaded kernels."""


def find(overlays: Iterable[Erratum]) -> tuple[str, ...]:
    """Return a sentence for each overlay whose target symbol is also defined in a loaded kernel of the Hub.

    Args:
        overlays: the declarations to search for; those without seams are left out.
    """
    if PACKAGE not in sys.modules:
        return ()
    roots = dict(_kernels())
    modules = [(name, module, root) for name, module in list(sys.modules.items()) if (root := _root_of(name, roots))]
    found = {}
    for overlay in overlays:
        symbol = overlay.target.symbol.partition(".")[0]
        for name, module, root in modules if overlay.installs else ():
            if getattr(getattr(module, "__dict__", {}).get(symbol), "__module__", None) == name:
                copied = f"{overlay.target.distribution}'s {symbol}"
                found[overlay.id, name] = (
                    f"{overlay.id}: {roots[root]} was loaded from the Hub by `kernels` and has a copy of {copied}, which no "
                    f"overlay repairs ({module.__file__})"
                )
    return tuple(found.values())


def _kernels() -> Iterator[tuple[str, str]]:
    """Yield the module name of each loaded kernel, and its repository or another name for the reader."""
    try:
        loaded = list(sys.modules[PACKAGE].get_loaded_kernels())
    except Exception:  # noqa: BLE001 - another release of `kernels`, or half imported
        loaded = []
    for each in loaded:
        repository = getattr(each.repo_info, "repo_id", None)
        yield each.module.__name__, str(repository or f"the kernel {each.metadata.name}")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # getattr could make a lazy module import something
        if isinstance(file, str) and "." not in name and (repository := _repository_of(file)):
            yield name, repository


def _repository_of(file: str) -> str:
    """Return the repository of a file in a snapshot of the Hub's cache; empty for any other file."""
    for mark in _IN_A_CACHE:
        _, is_in_a_cache, rest = file.partition(mark)
        if is_in_a_cache and "/snapshots/" in rest:
            return "/".join(rest.partition("/")[0].split("--", 1))
    return ""


def _root_of(name: str, roots: Iterable[str]) -> str:
    return next((root for root in roots if name == root or name.startswith(f"{root}.")), "")
