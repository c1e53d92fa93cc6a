"""Published releases, byte for byte: a digest of all Python files of a package distinguishes a release from an edited tree.

A recorded repair counts as proved in a published release. In any other tree a caller, a flag or a configuration may no
longer lead to the same text. `published.json` has a digest for each release of each package with a target, and for the heads
of branches that were read; `scripts/known_findings.py` writes it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from megacpp_overlays.model import Target
from megacpp_overlays.source import knowledge
from megacpp_overlays.source.trees import SourceTree, readable

FILE = knowledge.PUBLISHED
_DEPTHS = {"torch": 3}
"""Maximal depth of the digested packages, in names, for distributions with thousands of files, some of which are only in builds for some GPUs."""
_MODULES = {"transformers"}
"""Distributions of thousands of models. Only the modules of targets are compared with the loaded code."""


def package_of(target: Target) -> str:
    """Return the package of a distribution that a target is in: `megatron.core` or `megatron.training` of megatron-core, else the first name; see `_DEPTHS`."""
    if depth := _DEPTHS.get(target.distribution):
        return ".".join(target.module.split(".")[:-1][:depth])
    namespace, *within = target.distribution.split("-")
    first, *names = target.module.split(".")
    return ".".join([first, *names[: len(within)]]) if first == namespace else first


def surroundings_of(target: Target) -> str:
    """Return the package around a target that is compared with the loaded code: the first name, or less where that is thousands of files."""
    if target.distribution in _MODULES:
        return target.module
    return package_of(target) if target.distribution in _DEPTHS else target.module.partition(".")[0]


def key_of(target: Target) -> str:
    """Return the key in `published.json` for the package of a target: its distribution, or `megatron-core megatron.training` for a second package of it."""
    package, named = package_of(target), target.distribution.replace("-", ".")
    return f"{target.distribution} {package}" if "." in package and package != named else target.distribution


def release_of(target: Target, tree: SourceTree) -> str | None:
    """Return the release of the package of a target, or None where its files are those of no known release.

    A second package of a distribution, such as `megatron.training`, calls the main one, here `megatron.core`: the files of both must be those of one release.
    torch has no main package.

    Args:
        target: the target of an overlay.
        tree: an `InstalledTree`.

    Raises:
        OSError: a file of the package cannot be read.
    """
    key = key_of(target)
    found = _releases_of(key, package_of(target), target.module, tree)
    if key != target.distribution and target.distribution not in _DEPTHS:
        main = target.distribution.replace("-", ".")
        of_main = _releases_of(target.distribution, main, main, tree)
        found = [release for release in found if release in of_main]
    return found[-1] if found else None


def _releases_of(key: str, package: str, module: str, tree: SourceTree) -> list[str]:
    """Return the releases whose files are those of an installed package, which is found by one of its modules."""
    if (source := readable(tree, module)) is None:  # a release without this module
        module = package
        source = readable(tree, module)
    if source is None or not Path(source.path).is_absolute():
        return []
    names = module.removeprefix(package).count(".")
    path = Path(source.path)
    folder = (path.parent if path.name == "__init__.py" else path).parents[names - 1] if names else path.parent
    return _releases(key).get(digest_of_folder(str(folder)), [])


def has_releases_of(distribution: str) -> bool:
    """Return whether releases of a distribution can be distinguished from edited trees."""
    return distribution in knowledge.distributions()


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return 16 hexadecimal digits for the Python files of a package.

    Args:
        files: each with its path below the folder of the package, with `/`.
    """
    import hashlib  # noqa: PLC0415 - not needed to arm

    found = hashlib.sha256()
    for path, content in sorted(files):
        found.update(f"{path}\0".encode() + hashlib.sha256(content).digest())
    return found.hexdigest()[:16]


@functools.cache
def digest_of_folder(folder: str) -> str:
    """Return the digest of the Python files in a folder, read once a process: 500 files take 30 ms."""
    files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names if name.endswith(".py"))
    return digest((path[len(folder) + 1 :].replace(os.sep, "/"), _content(path)) for path in files)


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # a `Path` of each takes as long as to read and hash it
        return file.read()


@functools.cache
def _releases(key: str) -> dict[str, list[str]]:
    """Return the releases that this process knows of a package, by their digests."""
    found: dict[str, list[str]] = {}
    for name, its_digest in knowledge.published().get(key, {}).items():
        if knowledge.has(key.partition(" ")[0], [name]):
            found.setdefault(its_digest, []).append(name)
    return found
