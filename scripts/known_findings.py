"""Write known findings, megacpp_overlays/loader/known.json, and digests of releases, megacpp_overlays/source/published.json.

known_findings.py           write both, from the releases in .cache/wheels
known_findings.py --check   exit 1 if a file is out of step, and name it
known_findings.py --newest  check only the findings for the newest release of each distribution, which takes seconds
known_findings.py --head 'main d98e8a64dd=PATH'  add the digest of a checkout of Megatron-LM that was read

Findings are those of every probe, for the oldest release of its distribution that a lane pins and every later one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from megacpp_overlays.loader import known, registry
from megacpp_overlays.model import Overlay, Target
from megacpp_overlays.source import published
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.source.trees import CachedTree, SourceTree
from megacpp_overlays.upkeep.finding_cache import FindingCache

ROOT = Path(__file__).resolve().parents[1]
LANES = ("spring-2026", "summer-2026", "current", "newest", "mamba3-pinned", "edge")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
# Findings are the same on each of these versions, as tests check.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def main() -> int:
    """Write the findings, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if they are out of step")
    parser.add_argument("--archives", type=Path, default=ROOT / ".cache/wheels", metavar="FOLDER")
    parser.add_argument("--findings", type=Path, metavar="FOLDER", help="cache of findings")
    parser.add_argument("--newest", action="store_true", help="check only the findings for the newest releases")
    parser.add_argument(
        "--head", action="append", default=[], metavar="NAME=PATH", help="a checkout whose digest is kept"
    )
    given = parser.parse_args()
    if given.head:
        texts = json.loads(published.FILE.read_text(encoding="utf-8"))
        for name, _, path in (each.partition("=") for each in given.head):
            for key, target in packages().items():
                if target.distribution == "megatron-core":
                    folder = Path(path, *published.package_of(target).split("."))
                    texts[key][name] = published.digest_of_folder(str(folder.resolve()))
        published.FILE.write_text(json.dumps(texts, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if given.newest:
        differing = list(differing_of_newest(given.archives))
        print("\n".join(differing) or "as the probes find it")
        return int(bool(differing))
    found = json.dumps(collect(given.archives, FindingCache(given.findings)), indent=1, sort_keys=True) + "\n"
    digests = json.dumps(published_releases(given.archives), indent=0, sort_keys=True) + "\n"
    texts = {known.FILE: found, published.FILE: digests}
    if not given.check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    other = [path.name for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    print(f"{', '.join(other)} out of step: run scripts/known_findings.py" if other else "as the probes find it")
    return int(bool(other))


def packages() -> dict[str, Target]:
    """Return one target in each upstream package that overlays change, by `published.key_of`."""
    return {published.key_of(each.target): each.target for each in registry.load() if each.installs}


def published_releases(archives: Path) -> dict[str, dict[str, str]]:
    """Return the digest of each release of each package, by `published.key_of` and version.

    Digests of branch heads, whose names have a space, are kept.
    """
    kept = json.loads(published.FILE.read_text(encoding="utf-8"))
    found = {key: {name: digest for name, digest in of.items() if " " in name} for key, of in kept.items()}
    for key, target in packages().items():
        releases_of = found.setdefault(key, {})
        for version, path in _archives(target.distribution, archives).items():
            with ArchiveTree(path) as archive:
                if files := list(archive.python_files(published.package_of(target))):
                    releases_of[str(version)] = published.digest(files)
    return found


def differing_of_newest(archives: Path) -> Iterator[str]:
    """Yield kept findings for the newest release of each distribution that differ from the findings of the probes."""
    kept = json.loads(known.FILE.read_text(encoding="utf-8"))
    if (kept["probes"], tuple(kept["pythons"])) != (known.code(), PYTHONS):
        yield f"{known.FILE.name}: it was written with other probes"
    errata, cache = registry.load(), FindingCache()
    for distribution in sorted({each.target.distribution for each in errata}):
        version, path = max(each for each in _archives(distribution, archives).items() if not each[0].is_prerelease)
        with ArchiveTree(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = CachedTree(archive)
            for each in (each for each in errata if each.target.distribution == distribution):
                found, names = cache.derive(each, tree)
                if isinstance(each, Overlay) and names is not None:
                    sources = [tree.module(name) for name in names]
                    data = known.as_data(each, found, [source for source in sources if source is not None])
                    if _kept_finding(kept, each, names, known.digest(names, sources)) != json.loads(json.dumps(data)):
                        yield f"{known.FILE.name}: {known.name_of(each)} on {distribution} {version}"


def _kept_finding(kept: dict[str, Any], overlay: Overlay, names: tuple[str, ...], digest: str) -> dict[str, Any] | None:
    """Return the kept finding for these texts, or None."""
    for row in kept["parts"][known.name_of(overlay)]:
        if tuple(row["asked"]) == names and digest in row["found"]:
            found = kept["findings"][row["found"][digest]]
            return {**found, "read": [kept["readings"][int(number)] for number in found["read"].split()]}
    return None


def collect(archives: Path, cache: FindingCache) -> dict[str, Any]:
    """Return the contents of known.json."""
    overlays = [each for each in registry.load() if isinstance(each, Overlay)]
    parts: dict[str, dict[tuple[str, ...], dict[str, int]]] = {known.name_of(each): {} for each in overlays}
    findings: list[dict[str, Any]] = []
    for distribution in sorted({each.target.distribution for each in overlays}):
        chosen = [each for each in overlays if each.target.distribution == distribution]
        for path in releases(distribution, archives):
            with ArchiveTree(path) as archive, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old releases
                tree = CachedTree(archive)
                for overlay in chosen:
                    _keep(overlay, tree, parts[known.name_of(overlay)], findings, cache)
    cache.save()
    rows = {
        name: [
            {"asked": list(asked), "found": dict(sorted(found.items()))} for asked, found in sorted(by_asked.items())
        ]
        for name, by_asked in parts.items()
    }
    return {"pythons": PYTHONS, "probes": known.code(), "parts": rows, **known.numbered(findings)}


def _keep(
    overlay: Overlay,
    tree: SourceTree,
    kept: dict[tuple[str, ...], dict[str, int]],
    findings: list[dict[str, Any]],
    cache: FindingCache,
) -> None:
    found, names = cache.derive(overlay, tree)
    if names is None:
        return  # the finding rests on a file that is no module or cannot be read
    sources = [tree.module(name) for name in names]
    data = known.as_data(overlay, found, [each for each in sources if each is not None])
    if data is None:
        return
    if data not in findings:
        findings.append(data)
    kept.setdefault(names, {})[known.digest(names, sources)] = findings.index(data)


def releases(distribution: str, archives: Path) -> Iterator[Path]:
    """Yield the final releases in order, from the oldest that a lane pins."""
    oldest = min(_pinned(distribution))
    found = _archives(distribution, archives)
    if not found:
        raise SystemExit(f"{archives} has no release of {distribution}: make wheels")
    yield from (path for version, path in sorted(found.items()) if version >= oldest and not version.is_prerelease)


def _archives(distribution: str, archives: Path) -> dict[Version, Path]:
    wanted = canonicalize_name(distribution)
    parsed = ((path, *_parse_name(path)) for path in sorted(archives.iterdir()))
    return {version: path for path, name, version in parsed if name == wanted}


def _pinned(distribution: str) -> Iterator[Version]:
    for lane in LANES:
        for lock in (ROOT / "locks").glob(f"{lane}*.txt"):
            for name, version in _PIN.findall(lock.read_text(encoding="utf-8")):
                if canonicalize_name(name) == canonicalize_name(distribution):
                    yield Version(version)


def _parse_name(path: Path) -> tuple[str, Version]:
    parse = parse_wheel_filename if path.suffix == ".whl" else parse_sdist_filename
    name, version = parse(path.name)[:2]
    return name, version


if __name__ == "__main__":
    sys.exit(main())
