"""Kept witnesses: verdicts of reproducers on code that probes do not recognise, bound to that code.

A witness is one small JSON file for a part of an overlay in one environment. `megacpp-overlays witness` writes it. Its verdict:

    FIXED    upstream alone has no defect
    BROKEN   upstream alone has the defect; the seams of the named shape remove it, and neighbour cases stay the same

Where upstream alone has the defect and no seams were shown to repair it, the witness is BROKEN with a reason in place of a
shape: nothing is installed, and no other witness or record counts.

A witness counts while everything that it depends on is unchanged: the source of every module that the probe read and of every
module of the upstream that was loaded in the run, the absence of modules that were missing, the probe, the reproducer, the
versions of the distributions, and for BROKEN the code of the seams. Otherwise the finding stays, and its evidence has the
reason. A file is read only where it belongs to this user or to root, in a folder that no other user can write to.

The witnesses of an image are written by root and count for every user. The verdicts of such a user are kept in the user's own
cache, which is read first.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megacpp_overlays import files
from megacpp_overlays.errors import OverlayError, SourceError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader.decide import NOT_REPAIRED
from megacpp_overlays.loader.settings import Settings, this_environment
from megacpp_overlays.model import Body, Erratum, Evidence, Finding, Proof, Verdict
from megacpp_overlays.source import definitions, distributions, fingerprint
from megacpp_overlays.source.trees import (
    FunctionNode,
    InstalledTree,
    ModuleSource,
    ShippedFile,
    SourceTree,
    readable,
    shipped,
)
from megacpp_overlays.terminal_text import one_line
from megacpp_overlays.version import VERSION

SCHEMA = 1
LARGEST = 4 << 20
"""Bytes. A witness of every module of the largest upstream has a tenth of that."""
UNREADABLE = "unreadable"
"""In place of the hash of a file that exists and cannot be read."""

PACKS = Path(__file__).resolve().parents[1] / "packs"
"""Folder of the reproducers of this package; the reproducers of a plugin are elsewhere, and are not compared."""
_OURS = "megacpp_overlays"
_PROBE_MODULES = (f"{_OURS}.feature_probes.", f"{_OURS}.source.", f"{_OURS}.model")
"""Modules of this package with the code of probes; for a plugin, its whole package counts."""
_SEAM_MODULES = (
    *_PROBE_MODULES,
    *(f"{_OURS}.{name}" for name in ("overlays.", "runtime.", "kernels.", "fp32_marks", "fp8_sparse_mla")),
)
"""Modules with the code of probes and seams."""
_DECLARATIONS = frozenset({"Gate", "Overlay"})
PROSE = frozenset(
    {"breaks", "brief", "concerns", "last_validated", "retire_when", "symptoms", "threads", "title", "until"}
)
"""Fields of a declaration that are for people: no verdict and no seam depends on them."""
_WITNESSED = frozenset({Verdict.FIXED.value, Verdict.BROKEN.value})

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

Sources = Mapping[str, str | None]
"""Hashes by source: `package.module`, or `package:path` for a shipped file; None for a source that does not exist."""


class UnprovedError(OverlayError):
    """Raised where a kept witness does not count; the text says why."""


class RecordingTree:
    """A tree that records each source that was requested, and its hash."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self.sources: dict[str, str | None] = {}

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, and record its hash."""
        self.sources[name] = UNREADABLE
        source = self._tree.module(name)
        self.sources[name] = source.sha256 if source else None
        return source

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file that is not a module, and record its hash."""
        self.sources[f"{package}:{path}"] = UNREADABLE
        file = shipped(self._tree, package, path)
        self.sources[f"{package}:{path}"] = _sha256(file.text.encode()) if file else None
        return file


_trials: dict[tuple[str, str], str] = {}
"""Shapes on trial in this process, by overlay and module; only the process of a reproducer's case has any."""


def try_out(shapes: Mapping[tuple[str, str], str]) -> None:
    """Accept candidate shapes without proof in this process, which tests whether their seams repair the defect.

    Args:
        shapes: by overlay and module.
    """
    _trials.update(shapes)


def proved(erratum: Erratum, finding: Finding, tree: SourceTree, settings: Settings) -> Finding:
    """Return the finding with the verdict of a kept witness, or else with the reasons why no witness counts.

    Without a witness the finding is returned as it is.

    Args:
        erratum: the declaration.
        finding: of its probe: it looks repaired, or has candidate shapes.
        tree: the sources that the probe read.
        settings: name the folder of witnesses.
    """
    tried = _trials.get((erratum.id, erratum.target.module))
    if tried is not None and tried in finding.candidates:
        return of_verdict(erratum, finding, Verdict.BROKEN, tried, Evidence("tried out by its reproducer"))
    reasons = []
    for path in _paths(erratum, settings):
        try:
            if (found := _witnessed(path, erratum, finding, tree)) is not None:
                return found
        except MemoryError:  # noqa: PERF203 - two files at most
            raise  # a lack of memory says nothing about the witness
        except Exception as error:  # noqa: BLE001 - a witness that fails in any way is no proof
            why = one_line(str(error) if isinstance(error, UnprovedError) else f"{type(error).__name__}: {error}")
            reasons.append(Evidence(f"the kept witness does not count: {why}"))
    return replace(finding, evidence=(*finding.evidence, *reasons)) if reasons else finding


def _witnessed(path: Path, erratum: Erratum, finding: Finding, tree: SourceTree) -> Finding | None:
    """Return the finding with the verdict of the witness in a file, or None where there is no file.

    Raises:
        UnprovedError: it does not count.
    """
    if not path.exists():
        return None
    data = _read(path)
    _compare(data, erratum, tree)
    if (unrepaired := data.get("unrepaired")) is not None:
        shown = Evidence(one_line(f"shown here on {data['date']}: {unrepaired}"))
        return of_verdict(erratum, finding, Verdict.BROKEN, NOT_REPAIRED, shown)
    _demand_candidate(data, finding)
    cases = ", ".join(each["case"] for each in data["cases"])
    seen = one_line(f"witnessed here on {data['date']} by {cases}: {data['cases'][0]['seen']}")
    return of_verdict(erratum, finding, Verdict(data["verdict"]), data.get("shape"), Evidence(seen))


def of_verdict(
    erratum: Erratum,
    finding: Finding,
    verdict: Verdict,
    shape: str | None,
    seen: Evidence,
    proof: Proof = Proof.WITNESSED,
) -> Finding:
    """Return a finding with the verdict of a reproducer; its repair is the probe's, else all definitions that were read, else the target."""
    bodies = finding.repair or tuple(Body(each.module, each.symbol) for each in finding.read)
    bodies = bodies or (Body(erratum.target.module, ""),)
    return Finding(
        verdict=verdict,
        shape=shape,
        evidence=(*finding.evidence, seen),
        repair=bodies if verdict is Verdict.FIXED else (),
        proof=proof,
        read=finding.read,
    )


def folders_of(settings: Settings) -> tuple[Path, ...]:
    """Return the folders of witnesses, in the order of search. The first is this user's: new ones are kept there."""
    own = files.cache_folder() / "witness"
    given = Path(settings.witnesses) if settings.witnesses is not None else own
    return (own, given) if files.is_of_root_alone(given) else (given,)


def folder_of(settings: Settings) -> Path:
    """Return the folder in which witnesses are kept."""
    return folders_of(settings)[0]


@contextlib.contextmanager
def one_at_a_time(settings: Settings) -> Iterator[None]:
    """Let one process at a time run reproducers; others wait in the `with` statement, and then find its witnesses.

    Raises:
        OSError: the folder of witnesses is not this user's own, or cannot be made.
    """
    folder = folder_of(settings)
    files.make_private_folder(folder)
    with files.locked(folder):
        yield


def path_of(erratum: Erratum, settings: Settings) -> Path:
    """Return the file in which a witness of a part of an overlay in this environment is kept."""
    return _paths(erratum, settings)[0]


def _paths(erratum: Erratum, settings: Settings) -> list[Path]:
    about = "\0".join([this_environment(), erratum.id, erratum.target.module])
    name = f"{erratum.id}-{_sha256(about.encode())[:16]}.json"
    return [folder / name for folder in folders_of(settings)]


def keep(path: Path, data: Mapping[str, Any], *, shared: bool = False) -> None:
    """Write a witness.

    Args:
        path: from `path_of`.
        data: from `content`.
        shared: whether other users may read it.

    Raises:
        OSError: it cannot be written, or the folder is not this user's own.
    """
    if shared:
        path.parent.mkdir(parents=True, exist_ok=True)
    files.make_private_folder(path.parent)
    files.write({path: (json.dumps(data, indent=1) + "\n").encode()}, private=True)
    if shared:
        path.chmod(0o644)


def is_shared(settings: Settings) -> bool:
    """Return whether other users may read new witnesses: root has a folder in the settings, as in the build of an image."""
    return settings.witnesses is not None and os.geteuid() == 0


def forget(erratum: Erratum, settings: Settings) -> None:
    """Remove this user's witness after its reproducer gave no verdict; one that cannot be removed stays."""
    with contextlib.suppress(OSError):
        path_of(erratum, settings).unlink()


def content(
    erratum: Erratum,
    *,
    sources: Sources,
    versions: Mapping[str, str | None],
    reproducer: Path,
    cases: object,
    host: object,
    date: str,
    verdict: Verdict = Verdict.FIXED,
    shape: str | None = None,
    unrepaired: str | None = None,
) -> dict[str, Any]:
    """Return the content of a witness file, for the environment of this process.

    Args:
        erratum: the declaration of the part.
        sources: hashes of the sources that were read and loaded.
        versions: distributions that the reproducer ran with.
        reproducer: the file of the cases.
        cases: name, device and measurement of each that ran.
        host: the hardware and the system, without names of hosts or users; for people, and not compared.
        date: the day of the run.
        verdict: of the cases.
        shape: for BROKEN, the shape whose seams repair the defect.
        unrepaired: for BROKEN without such a shape, the sentence of the reproducer on the unrepaired defect.
    """
    code = seam_sources if verdict is Verdict.BROKEN else probe_sources
    return {
        "schema": SCHEMA,
        "overlay": erratum.id,
        "target": erratum.target.module,
        "verdict": verdict.value,
        "shape": shape,
        **({} if unrepaired is None else {"unrepaired": one_line(unrepaired)}),
        "date": date,
        "cases": cases,
        "reproducer": _sha256(reproducer.read_bytes()),
        "beside": beside(reproducer),
        "host": host,
        "package": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": dict(sorted(versions.items())),
        "probe": dict(sorted(code(erratum).items())),
        "sources": dict(sorted(sources.items())),
    }


def probe_sources(erratum: Erratum) -> dict[str, str | None]:
    """Return the hashes of the code of a probe: the modules of its declaration, and the probe modules that they import."""
    return {name: source.sha256 for name, source in _code(erratum, _PROBE_MODULES).items()}


def seam_sources(erratum: Erratum) -> dict[str, str | None]:
    """Return the hashes of the code of a probe and of the seams, kernels included."""
    return {name: source.sha256 for name, source in _code(erratum, _SEAM_MODULES).items()}


def meaning(erratum: Erratum, *, with_seams: bool) -> dict[str, str]:
    """Return the hashes of the same code without comments, docstrings and the fields of `PROSE`.

    Each module is parsed for them, in milliseconds, so only a verdict that must outlast edits of prose is bound to them.
    """
    found = _code(erratum, _SEAM_MODULES if with_seams else _PROBE_MODULES)
    return {name: _meaning(source.text) for name, source in found.items()}


def beside(reproducer: Path) -> dict[str, str]:
    """Return the hashes of the other Python files of a pack: neighbour cases, and cases that were written later."""
    files_beside = sorted(path for path in reproducer.parent.glob("*.py") if path.name != reproducer.name)
    return {path.name: _sha256(path.read_bytes()) for path in files_beside}


def _code(erratum: Erratum, prefixes: tuple[str, ...]) -> dict[str, ModuleSource]:
    tree = InstalledTree()
    waiting = _declared_in(erratum)
    top_levels = {name.partition(".")[0] for name in waiting}
    found: dict[str, ModuleSource] = {}
    while waiting:
        source = tree.module(name := waiting.pop())
        if source is not None and name not in found:
            found[name] = source
            imported = {
                each for each in definitions.imported_names(source.syntax) if _is_in(each, prefixes, top_levels)
            }
            waiting |= imported - found.keys()
    return found


@functools.cache
def _meaning(text: str) -> str:
    """Return the hash of a module without its prose."""
    syntax = ast.parse(text)
    for node in ast.walk(syntax):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _DECLARATIONS:
            node.keywords = [each for each in node.keywords if each.arg not in PROSE]
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            node.body = [each for each in node.body if not fingerprint.is_docstring(each)]
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if not _is_field_of_prose(each)]
    return fingerprint.digest(syntax)


def _is_field_of_prose(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in PROSE


def _declared_in(erratum: Erratum) -> set[str]:
    return {each.__module__ for function in erratum.functions for each in _functions(function)}


def _functions(function: Any) -> Iterator[Any]:
    """Yield a function, or for a partial all functions inside it."""
    if not isinstance(function, functools.partial):
        yield function
        return
    for each in (function.func, *function.args, *function.keywords.values()):
        if callable(each):
            yield from _functions(each)


def _is_in(name: str, prefixes: tuple[str, ...], top_levels: set[str]) -> bool:
    top = name.partition(".")[0]
    return name.startswith(prefixes) if top == _OURS else top in top_levels


def _read(path: Path) -> Mapping[str, Any]:
    """Return the content of a witness file.

    Raises:
        UnprovedError: it cannot be read, or is no witness.
    """
    try:
        files.demand_private_folder(path.parent, or_of_root=True)
        data = json.loads(files.read_own(path, LARGEST, or_of_root=True))
    except OSError as error:
        raise UnprovedError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnprovedError(f"{path} is no witness: {type(error).__name__}") from error
    if not _is_witness(data):
        raise UnprovedError(f"{path} is no witness of this version of the package")
    found: Mapping[str, Any] = data
    return found


def _is_witness(data: Any) -> bool:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return False
    if data.get("verdict") not in _WITNESSED:
        return False
    if not _has_valid_repair(data):
        return False
    texts = ("overlay", "target", "date", "reproducer", "python", "machine")
    tables = [data.get(name) for name in ("sources", "versions", "probe")]
    cases = data.get("cases")
    return (
        all(isinstance(data.get(name), str) for name in texts)
        and _is_day(data["date"])
        and all(isinstance(each, dict) and all(isinstance(v, str | None) for v in each.values()) for each in tables)
        and bool(data["sources"])
        and isinstance(cases, list)
        and bool(cases)
        and all(
            isinstance(each, dict) and all(isinstance(each.get(k), str) for k in ("case", "seen")) for each in cases
        )
    )


def _has_valid_repair(data: Mapping[str, Any]) -> bool:
    """Return whether a BROKEN witness has one of `shape` and `unrepaired`, and a FIXED one neither."""
    found = [isinstance(data.get(name), str) for name in ("shape", "unrepaired")]
    return sum(found) == (data["verdict"] == Verdict.BROKEN.value) and isinstance(data.get("unrepaired", ""), str)


def _is_day(text: str) -> bool:
    """Return whether a text is a date in the form of `content`, such as 2026-11-26."""
    if not _DAY.fullmatch(text):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _compare(data: Mapping[str, Any], erratum: Erratum, tree: SourceTree) -> None:
    """Compare a witness with this environment.

    Raises:
        UnprovedError: something has changed; the text names the first change.
    """
    if (data["overlay"], data["target"]) != (erratum.id, erratum.target.module):
        raise UnprovedError(f"it is about {data['overlay']} on {data['target']}")
    for name, here in (("python", platform.python_version()), ("machine", platform.machine())):
        if data[name] != here:
            raise UnprovedError(f"{name} was {data[name]} and is {here}")
    if erratum.target.module not in data["sources"]:
        raise UnprovedError(f"the hash of {erratum.target.module} is missing")
    for name, was in data["sources"].items():
        if (change := _change(was, _hashes.of(name, tree))) is not None:
            raise UnprovedError(f"{name} {change}")
    for name, was in data["versions"].items():
        if (version := distributions.version(name)) != was:
            raise UnprovedError(f"{name} was {was or 'not installed'} and is {version or 'not installed'}")
    code = RecordingTree(InstalledTree())  # where these texts are equal, no other module can be imported
    for name in dict.fromkeys([*_declared_in(erratum), *data["probe"]]):
        if sha256_of(code, name) != data["probe"].get(name):
            raise UnprovedError(f"the probe is another one since: {name}")
    for reproducer in PACKS.glob(f"{erratum.pack:02}-*/reproduce.py"):
        if _sha256(reproducer.read_bytes()) != data["reproducer"]:
            raise UnprovedError("the reproducer is another one since")
        if beside(reproducer) != data.get("beside", {}):
            raise UnprovedError("the neighbour cases are others since")


class _Hashes:
    """Hashes of installed sources. Each file is read once per process, and again where it was replaced.

    Witnesses of one release name the same few hundred modules.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], str, tuple[int, ...], str]] = {}

    def of(self, name: str, tree: SourceTree) -> str | None:
        """Return the hash of a source in a tree; its name is a key of `Sources`."""
        match self._kept.get(name):
            case (path, file, signature, sha256) if path == tuple(sys.path) and file == _loaded_from(name, file):
                with contextlib.suppress(OSError):
                    if signature == _signature(file):
                        return sha256
        source = None if ":" in name else readable(tree, name)
        if source is None:
            return sha256_of(RecordingTree(tree), name)
        with contextlib.suppress(OSError):
            self._kept[name] = tuple(sys.path), source.path, _signature(source.path), source.sha256
        return source.sha256


_hashes = _Hashes()


def _signature(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _loaded_from(name: str, default: str) -> str:
    """Return the file that a module was loaded from, or the default where it is not loaded."""
    return getattr(sys.modules.get(name), "__file__", None) or default


def sha256_of(tree: RecordingTree, name: str) -> str | None:
    """Return the hash of a source in a tree; its name is a key of `Sources`."""
    package, _, path = name.partition(":")
    try:
        if path:
            tree.shipped(package, path)
        else:
            tree.module(package)
    except SourceError:
        return UNREADABLE
    return tree.sources[name]


def _demand_candidate(data: Mapping[str, Any], finding: Finding) -> None:
    """Raise UnprovedError where the shape of a witness is no candidate of the finding."""
    if data["verdict"] == Verdict.BROKEN.value and data["shape"] not in finding.candidates:
        raise UnprovedError(f"the seams of shape {data['shape']} cannot be placed")


def _change(was: str | None, here: str | None) -> str | None:
    if was == here:
        return None
    if was is None:
        return "was not there, and is now"
    return "is not there any more" if here is None else "is not as it was witnessed"


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
