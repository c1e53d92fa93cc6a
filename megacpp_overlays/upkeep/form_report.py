"""A report on one overlay for its maintainer on another host: plain data, without paths and secrets.

Where a form is not recognised, its maintainer has to see it before a probe can recognise it. The report has no code except the
lines that the evidence quotes. It has hashes of the modules that the probe read, and a fingerprint of every function in them,
which show the functions that differ from those of a release. It has versions of the environment and no variables.
"""

from __future__ import annotations

import ast
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader import probing
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.rendering import as_dict
from megacpp_overlays.loader.statement import BESIDE_TARGETS
from megacpp_overlays.loader.witnesses import RecordingTree
from megacpp_overlays.model import Erratum
from megacpp_overlays.source import distributions
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import FunctionNode, InstalledTree, ModuleSource, SourceTree
from megacpp_overlays.version import VERSION

SCHEMA = 1
"""Version of the report's schema. It changes when a key changes its meaning."""
_FOLDERS = re.compile(r"(?<![\w.~/])~?/(?:[^\s/:'\"(),]+/)+")
"""The folders of an absolute path; not those of a URL, whose slash follows another slash."""


def of(overlay_id: str, audit: Audit, *, paths: bool = False) -> dict[str, Any]:
    """Return the report on an overlay or a gate.

    Args:
        overlay_id: the id of the overlay or gate.
        audit: the audit of this process, with the targets imported.
        paths: whether to keep folders of this host in the texts.
    """
    parts = [record for record in audit.records if record.overlay.id == overlay_id]
    tree = InstalledTree()
    recorded = RecordingTree(tree)
    for record in parts:
        probing.examine(record.overlay, recorded)
    report = {
        "schema": SCHEMA,
        "package": "megacpp_overlays",
        "version": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": _versions([record.overlay for record in parts]),
        "parts": [as_dict(record) for record in parts],
        "sources": {name: _source(name, sha256, tree) for name, sha256 in sorted(recorded.sources.items())},
        "audit": audit.as_dict(),
    }
    return report if paths else _mapped(report, _without_folders)


def _versions(errata: Sequence[Erratum]) -> dict[str, str | None]:
    names = {each.target.distribution for each in errata}.union(*(each.companions for each in errata), BESIDE_TARGETS)
    return {name: distributions.version(name) for name in sorted(names)}


def _source(name: str, sha256: str | None, tree: SourceTree) -> dict[str, Any]:
    """Return the hash of a text that a probe requested, None where the text is missing, and the functions in it."""
    functions: dict[str, str] = {}
    try:
        source = None if ":" in name else tree.module(name)
        if source is not None:
            functions = dict(_functions(source))
    except SourceError as error:
        return {"sha256": sha256, "functions": functions, "problem": str(error)}
    return {"sha256": sha256, "functions": functions}


def _functions(source: ModuleSource) -> Iterator[tuple[str, str]]:
    """Yield the qualified name and fingerprint of every function and method; of a name that is defined twice, the last counts."""
    waiting: list[tuple[str, ast.AST]] = [("", source.syntax)]
    while waiting:
        prefix, scope = waiting.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, FunctionNode):
                yield f"{prefix}{node.name}", fingerprint(node)
            elif isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.stmt):
                waiting.append((prefix, node))


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)


def _mapped(data: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with every text in it changed."""
    if isinstance(data, dict):
        return {change(name): _mapped(value, change) for name, value in data.items()}
    if isinstance(data, list):
        return [_mapped(value, change) for value in data]
    return change(data) if isinstance(data, str) else data
