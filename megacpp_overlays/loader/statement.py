"""Statement of one process, as plain data: two processes run the same code if their statements are equal.

An audit records the decision of each overlay. A statement adds three things. For a target that is not imported yet, it has the
version and the hash of its file, which is read without an import. It has a hash of the files of this package and one of its kernels, because a
checkout keeps its version while it is edited. And it has every setting that changes the results of a run. It leaves out
legitimate differences between processes: hosts, paths, times, log forms, aliases that were found and rebound. `variables` says of
each setting how it is compared, or why it is not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_overlays.model import Decision, Erratum, Record
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import CachedTree, SourceTree, readable

if TYPE_CHECKING:
    from megacpp_overlays.loader.audit import Audit

SCHEMA = 1
"""Version of the form. It changes when a key changes its meaning."""

Statement = Mapping[str, Any]
"""Plain data, as `of` returns it or as JSON brings it back."""

BESIDE_TARGETS = ("torch", "triton")
"""Distributions that every target is built on, compared although no overlay is about them."""

LONGEST_TEXT = 1000
"""Most characters of a reason in a statement. A reason may be an exception of upstream, of any length."""

RUN = (
    "__init__.py",
    "concerns",
    "errors.py",
    "files.py",
    "feature_probes",
    "fp32_marks.py",
    "fp8_sparse_mla.py",
    "frozen.py",
    "gpus.py",
    "loader",
    "model.py",
    "near_names.py",
    "overlays",
    "processes",
    "runtime",
    "source",
    "terminal_text.py",
    "variables.py",
    "version.py",
)
"""Files and folders of this package that a training process may execute or read, without kernels; folders with their subfolders."""
KERNELS = ("kernels",)
"""The folder of kernels, which has a separate hash: a kernel may change while the loader and its decisions do not."""
NOT_RUN = ("__main__.py", "cli", "json_text.py", "packs", "repro", "upkeep")
"""All other files and folders. `megacpp-overlays run` replaces its process by the launcher, so they do not run in training."""
_SUFFIXES = frozenset({".py", ".json"})


def of(audit: Audit, tree: SourceTree) -> Statement:
    """Return the statement of a process.

    Args:
        audit: its decisions, with its settings.
        tree: the source tree of targets that are not imported yet.
    """
    version = functools.cache(distributions.version)
    sources = CachedTree(tree)
    return {
        "schema": SCHEMA,
        "version": audit.version,
        "package_sha256": _own_sha256(RUN),
        "kernels_sha256": _own_sha256(KERNELS),
        "mode": audit.mode,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in BESIDE_TARGETS},
        "settings": dict(audit.settings.of_kernels),
        "off": sorted(audit.settings.disabled | _not_asked_for(audit)),
        # A gate changes nothing in a process, and its decision may depend on the GPUs of the host.
        "decisions": [_decision(each, sources, version) for each in audit.of_overlays],
    }


def checked(data: Any) -> Statement:
    """Return the statement of another process after checking the form of its compared fields.

    A process with another version of this package may have more fields, or fewer; that is reported as a difference.

    Raises:
        ValueError: the data is not a statement.
    """
    if not _fits(data, _FORM, ("mode", "off", "decisions")):
        raise ValueError("this is no statement of a process")
    if not all(
        _fits(each, _FORM_OF_DECISION, ("id", "target", "decision", "source_sha256")) for each in data["decisions"]
    ):
        raise ValueError("a decision of this statement is none")
    found: Statement = data
    return found


def _fits(data: Any, form: Mapping[str, Callable[[Any], bool]], required: Sequence[str]) -> bool:
    return (
        isinstance(data, dict)
        and all(name in data for name in required)
        and all(is_such(data[name]) for name, is_such in form.items() if name in data)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_named_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text_or_none, value.values()))


_FORM: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("version", "package_sha256", "kernels_sha256", "mode", "python"), _is_text),
    **dict.fromkeys(("versions", "settings"), _is_named_texts),
    "off": _is_texts,
    "decisions": lambda value: isinstance(value, list),
}
_FORM_OF_DECISION: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("id", "target", "module", "distribution", "verdict", "decision", "reason", "variable"), _is_text),
    **dict.fromkeys(("version", "source_sha256", "overlay_sha256", "shape", "proof"), _is_text_or_none),
    "seams": _is_texts,
}


def _not_asked_for(audit: Audit) -> frozenset[str]:
    """Return the overlays that are off by default and were not switched on."""
    offered = {record.overlay.id for record in audit.records if record.overlay.off_by_default}
    return frozenset(offered - audit.settings.enabled)


def _decision(record: Record, tree: SourceTree, look_up: Any) -> dict[str, Any]:
    target = record.overlay.target
    version, source_sha256 = record.version, record.source_sha256
    if record.decision in {Decision.ARMED, Decision.DISABLED} and source_sha256 is None:
        source = readable(tree, target.module)
        # A module of no distribution is "unversioned", as in its record after the import.
        version = look_up(target.distribution) or ("unversioned" if source else None)
        source_sha256 = source.sha256 if source else None
    return {
        "id": record.overlay.id,
        "target": str(target),
        "module": target.module,
        "distribution": target.distribution,
        "version": distributions.without_place(version),
        "source_sha256": source_sha256,
        "overlay_sha256": _declared_elsewhere(record.overlay),
        "verdict": record.verdict,
        "shape": record.finding.shape if record.finding else None,
        "proof": record.proof,
        "decision": record.decision.value,
        "reason": _shortened(record.reason),
        "seams": list(record.seams),
        "around": [_shortened(each) for each in record.around],
        "variable": record.overlay.variable,
    }


def _shortened(text: str) -> str:
    """Return a text, or the beginning of a long one with a hash of the whole, so that ranks exchange little data."""
    if len(text) <= LONGEST_TEXT:
        return text
    short = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{text[:LONGEST_TEXT]} ... ({len(text)} characters, SHA-256 {short})"


def package_sha256(package: Path = Path(__file__).parents[1], names: Sequence[str] = RUN) -> str:
    """Return one hash over the files of this package, or of a part of it, that a training process may execute or read.

    The hash is the same for a wheel and for the checkout that it was built from.

    Args:
        package: its folder.
        names: files and folders in it, `RUN` or `KERNELS`.
    """
    found = [path for name in names for path in _files(package / name)]
    # Overlays and probes are a link in a checkout and a folder in a wheel, so names are relative to the package.
    named = {path.relative_to(package).as_posix(): path for path in found}
    return _hash_of((name, named[name]) for name in sorted(named))


@functools.cache
def _own_sha256(names: tuple[str, ...]) -> str:
    """Return the hash of this package at the first call in this process; later edits do not run in it."""
    return package_sha256(names=names)


def _files(path: Path) -> list[Path]:
    return [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.suffix in _SUFFIXES]


def _declared_elsewhere(overlay: Erratum) -> str | None:
    """Return the hash of a plugin's files; overlays of this package are in the hash of the package."""
    names = {_module_of(function) for function in overlay.functions}
    # Sorted by module: the order of a set differs between processes, and files of two packages may have the same name.
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(names) if not _is_ours(name)]
    paths = [Path(file) for file in files if file]
    return _hash_of((path.name, path) for path in paths) if paths else None


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _hash_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return one hash over named files, in this order."""
    total = hashlib.sha256()
    for name, path in files:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        total.update(f"{name} {len(content)} ".encode())
        total.update(content)
    return total.hexdigest()


def digest(statement: Statement) -> str:
    """Return the fingerprint of a statement, 16 hexadecimal digits: a hash of all fields except the reasons of decisions."""
    bare = {
        **statement,
        "decisions": [{k: v for k, v in each.items() if k != "reason"} for each in statement["decisions"]],
    }
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()[:16]
