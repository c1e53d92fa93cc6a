"""Keep a folder of upstream wheels in step with a hashed list of them.

    wheels.py fetch LIST FOLDER               download missing or damaged files, each checked against its hash
    wheels.py fetch --sources LIST FOLDER     the same for a list of source archives
    wheels.py record LIST FOLDER              write the list anew from the wheels in the folder

The offline probe tests read many releases of one package, which no requirements file can name together. So files are fetched from
the index by their hashes; a wheel that it does not list is left to `pip download`, which also looks elsewhere. To add a release:
`pip download --no-deps --only-binary=:all: --dest FOLDER name==version` (with its platforms and one of PYTHONS below), then `record`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.upkeep.matrix.index_answers import configured
from megacpp_overlays.upkeep.matrix.package_index import PackageIndex
from megacpp_overlays.upkeep.matrix.releases import SMALL_BUILDS, ArchiveFile

# The listed wheels are read and never imported, so every host fetches the same ones. Old releases have none for 3.12.
PYTHONS = ("3.12", "3.11", "3.10")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "any",
)
"""See `SMALL_BUILDS` for distributions of which other wheels are read."""
SOURCES = frozenset({"mamba-ssm"})
"""Published as source alone, which pip would run."""
LINE = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9a-z.+]+) --hash=sha256:(?P<sha256>[0-9a-f]{64})")


@dataclass(frozen=True, order=True)
class Wheel:
    """One line of the list; a source archive where a release has no wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"

    def lies_in(self, folder: Path) -> bool:
        """Whether the folder has this very file."""
        stem = f"{self.name.replace('-', '_')}-{self.version}"
        found = [*folder.glob(f"{stem}-*.whl"), *folder.glob(f"{stem}.tar.gz")]
        return any(digest(path) == self.sha256 for path in found)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path: Path) -> list[Wheel]:
    """Return the wheels of a list.

    Raises:
        SystemExit: a line is not `name==version --hash=sha256:...`.
    """
    wheels = []
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if (match := LINE.fullmatch(line)) is None:
            sys.exit(f"error: {path}: cannot read the line: {line}")
        wheels.append(Wheel(**match.groupdict()))
    return wheels


def fetch(wheels: list[Wheel], folder: Path, workers: int, *, sources: bool = False) -> int:
    """Download missing files, source archives or wheels; return how many could not be had."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        missing = [
            wheel
            for wheel, there in zip(wheels, pool.map(lambda each: each.lies_in(folder), wheels), strict=True)
            if not there
        ]
    kind = "source archives" if sources else "upstream wheels"
    print(f"== {folder}: {len(wheels) - len(missing)} of {len(wheels)} {kind} are there", flush=True)
    if not missing:
        return 0
    failed, index = 0, PackageIndex(configured())
    with contextlib.closing(index), ThreadPoolExecutor(workers) as pool:
        files, problems = _listed(index, {wheel.name for wheel in missing})

        def download(wheel: Wheel) -> str | None:
            problem = _from_index(wheel, folder, index, files) or problems.get(wheel.name)
            return _through_pip(wheel, folder) if problem and not sources and wheel.name not in SOURCES else problem

        jobs = {pool.submit(download, wheel): wheel for wheel in missing}
        for number, job in enumerate(as_completed(jobs), start=1):
            wheel, problem = jobs[job], job.result()
            failed += bool(problem)
            print(f"   {number}/{len(missing)} {wheel.name} {wheel.version} {problem or ''}".rstrip(), flush=True)
    return failed


def _listed(index: PackageIndex, names: Iterable[str]) -> tuple[dict[str, ArchiveFile], dict[str, str]]:
    """Return the files that an index lists for distributions, by SHA-256, and why it lists none, by distribution."""
    files: dict[str, ArchiveFile] = {}
    problems: dict[str, str] = {}
    for name in sorted(names):
        try:
            files |= {file.sha256: file for release in index.ask(name).releases for file in release.files}
        except OverlayError as error:  # noqa: PERF203 - a few names
            problems[name] = f"FAILED\n{error}"
    return files, problems


def _from_index(wheel: Wheel, folder: Path, index: PackageIndex, files: Mapping[str, ArchiveFile]) -> str | None:
    """Fetch one file from the index and check its hash; return the error, if any."""
    if (file := files.get(wheel.sha256)) is None:
        return "FAILED\nthe index has no file with this hash"
    # The file appears in the folder complete or not at all, even if another process fetches it at the same time.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            index.download(file, path := Path(temporary, file.name))
        except OverlayError as error:
            return f"FAILED\n{error}"
        os.replace(path, folder / file.name)
    return None


def _through_pip(wheel: Wheel, folder: Path) -> str | None:
    """Let pip fetch one wheel, which also looks where it is configured to; return the error, if any."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wanted = Path(temporary, "wanted.txt")
        wanted.write_text(f"{wheel}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [
            "--only-binary=:all:",
            *(f"--platform={each}" for each in SMALL_BUILDS.get(wheel.name, PLATFORMS)),
            "--require-hashes",
            "--requirement",
            str(wanted),
            "--dest",
            temporary,
        ]
        for python in PYTHONS:
            asked = [*command, f"--python-version={python}"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            return f"FAILED\n{done.stderr.strip()}"
        for path in Path(temporary).glob("*.whl"):
            os.replace(path, folder / path.name)
    return None


def record(folder: Path) -> list[Wheel]:
    """Return the wheels of a folder, by name and release order."""
    wheels = []
    for path in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        name, version, *_ = path.name.removesuffix(".tar.gz").split("-")
        wheels.append(Wheel(name.replace("_", "-").lower(), version, digest(path)))
    return sorted(wheels, key=lambda wheel: (wheel.name, [int(part) for part in re.findall(r"\d+", wheel.version)]))


def main() -> int:
    """Run one command; return 0 when the folder and the list agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fetch", "record"])
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", action="store_true", help="fetch: the list is of source archives")
    parser.add_argument("--workers", type=int, default=4, help="downloads at the same time")
    chosen = parser.parse_args()
    if chosen.command == "record":
        lines = "".join(f"{wheel}\n" for wheel in record(chosen.folder))
        chosen.list.write_text(f"# Upstream wheels for the offline probe tests; written by scripts/wheels.py.\n{lines}")
        return 0
    return 1 if fetch(read(chosen.list), chosen.folder, chosen.workers, sources=chosen.sources) else 0


if __name__ == "__main__":
    sys.exit(main())
