"""`megacpp-overlays learn`: run the reproducers on a new release, and record their verdicts in this package."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids, extra
from megacpp_overlays.cli.witness import default_workers
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import session
from megacpp_overlays.model import Decision
from megacpp_overlays.repro import git, inventory
from megacpp_overlays.upkeep import learning
from megacpp_overlays.upkeep.learning import LearnOptions, ReleaseKnowledge, ReleaseTree

_TEXT = "Learn a release, or a commit: run its reproducers, and record for all users the verdicts on code that no probe recognises."
_MORE = """\
For maintainers, in a checkout. It fetches the release from the index, or takes a folder or a commit. It runs the reproducers of all
unproved overlays, in minutes and without anyone reading the release, and then those of all recognised ones. It writes
`loader/learned.json` and the digest in `source/published.json`, and lists the overlays that are still broken, those that upstream
repaired, and the few that need a person. Cases of a GPU run where this host has one.
"""
_EXAMPLES = (
    "learn megatron-core==0.20.0 --python .envs/newest/bin/python",
    "learn megatron-core --tree Megatron-LM@dev --python .envs/mamba3-pinned/bin/python",
)
_CODES = {
    ExitCode.CLEAN: "everything is decided",
    ExitCode.FOUND: "a person has to look at something: a contract is broken, a case could not be asked, or contradicts a probe",
    ExitCode.NOT_CHECKED: "the release cannot be had, or a process gave no answer",
    ExitCode.MISSING_EXTRA: "the extra `upkeep` is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "learn", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument(
        "what", metavar="DISTRIBUTION[==VERSION]", help="a release, or with --tree the distribution in the folder"
    )
    parser.add_argument(
        "--tree", metavar="PATH[@REV]", help="a folder that holds its packages, or a repository and a revision"
    )
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[], help="ask about this overlay; can be repeated"
    )
    parser.add_argument("--name", metavar="NAME", help="of a folder, for people (default: its branch and commit)")
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        type=Path,
        default=Path(sys.executable),
        help="interpreter that has the requirements of the release",
    )
    parser.add_argument("--workers", metavar="N", type=int, default=default_workers(), help="overlays at the same time")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Learn a release, print the verdicts, and return whether everything is decided."""
    distribution, sign, version = arguments.what.partition("==")
    if bool(sign) is bool(arguments.tree):
        parser.error("name DISTRIBUTION==VERSION, or DISTRIBUTION and --tree")
    overlays = session.current().overlays
    check_ids(arguments.only, overlays, parser, "--only")
    if distribution not in {each.target.distribution for each in overlays}:
        parser.error(f"{distribution}: no overlay is about it")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tree = (
            _tree(distribution, arguments.tree, arguments.name, folder)
            if arguments.tree
            else _release(distribution, version, folder)
        )
        found = learning.learn(tree, overlays, LearnOptions(arguments.python, arguments.workers, tuple(arguments.only)))
    print("\n".join(learning.lines(found, _newest(distribution))))
    return is_decided(found)


def is_decided(found: ReleaseKnowledge) -> bool:
    """Return whether no overlay needs a person."""
    return not found.contradicted and not {Decision.CONFLICT.value, Decision.UNPROVED.value} & {
        each for each, _ in found.decisions.values()
    }


def _release(distribution: str, version: str, folder: Path) -> ReleaseTree:
    """Fetch a release from the index and unpack it.

    Raises:
        UpkeepError: the index has no such version, or none of its files can be fetched.
    """
    with extra():
        from megacpp_overlays.upkeep.matrix import archives, index_answers  # noqa: PLC0415 - see `extra`

    cache = archives.default_folder()
    with index_answers.IndexAnswers(cache / "index", offline=False, tell=_tell) as index:
        answer = index.get(distribution)
        release = next((each for each in answer.releases if each.version == version), None)
        if release is None:
            raise UpkeepError(
                f"{distribution}: the index has no {version}; the newest is {answer.releases[-1].version}"
            )
        for file in release.files:
            if (path := archives.Archives(cache / "files", index=index.index).get(file)) is not None:
                return ReleaseTree(distribution, version, learning.unpack(path, folder))
    raise UpkeepError(f"{distribution} {version}: none of its files can be had")


def _tree(distribution: str, text: str, name: str | None, folder: Path) -> ReleaseTree:
    """Return the tree of a folder, or of a commit that is unpacked into a folder.

    Raises:
        UpkeepError: there is no such folder or commit, or a folder has no name.
    """
    if Path(text).is_dir():
        if name is None:
            raise UpkeepError(f"--tree {text}: a folder needs a --name, such as 'dev d48bd6be0a'")
        return ReleaseTree(distribution, name, Path(text))
    before, _, revision = text.rpartition("@")
    path = Path(before)
    commit = (
        git.ask(path, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        if path.is_dir()
        else None
    )
    if commit is None:
        raise UpkeepError(f"--tree {text}: there is no such folder, and no such commit")
    with tarfile.open(fileobj=BytesIO(git.content(path, "archive", "--format=tar", commit))) as opened:
        opened.extractall(folder, filter="data")
    branch = revision.rpartition("/")[2] if not commit.startswith(revision) else "commit"
    return ReleaseTree(distribution, name or f"{branch} {commit[:10]}", folder)


def _newest(distribution: str) -> dict[str, str]:
    """Return the verdicts on the newest release in the kept matrix, by overlay."""
    tables = json.loads((inventory.own_folder() / "matrix.json").read_text(encoding="utf-8"))
    for table in tables["distributions"]:
        if table["distribution"] == distribution:
            return {name: cell["verdict"] for name, cell in table["releases"][-1]["overlays"].items()}
    return {}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
