"""Building a new matrix, and checking a kept one against the probes and the index."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megacpp_overlays import files
from megacpp_overlays.model import Erratum
from megacpp_overlays.upkeep.finding_cache import FindingCache
from megacpp_overlays.upkeep.matrix import combinations, matrix, matrix_file, matrix_trees
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.index_answers import IndexAnswers, NoNetworkError
from megacpp_overlays.upkeep.matrix.matrix import Table
from megacpp_overlays.upkeep.matrix.releases import IndexAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Sources of releases."""

    cache: Path
    """Folder of earlier index answers and fetched files."""
    archives: tuple[Path, ...]
    """Folders with releases that are only read."""
    offline: bool
    tell: Callable[[str], None]
    """Receives progress lines, and a line when an old answer is used."""

    def answers(self) -> IndexAnswers:
        """Return the answers of the index; a context manager."""
        return IndexAnswers(self.cache / "index", offline=self.offline, tell=self.tell)

    def files(self, answers: IndexAnswers) -> Archives:
        """Return the files of releases."""
        return Archives(self.cache / "files", self.archives, answers.index, FindingCache(self.cache / "findings"))


def build(
    overlays: Sequence[Erratum],
    places: Places,
    *,
    target: str | None = None,
    pre: bool = False,
    trees: Sequence[str] = (),
    kept: Path | None = None,
) -> tuple[Table, ...]:
    """Probe every release, and the given trees.

    Args:
        overlays: every declared overlay.
        places: the sources of releases.
        target: a distribution or an overlay; None for all.
        pre: whether to read pre-releases and development builds, too.
        trees: folders or commits, as `matrix_trees.open_tree` takes them.
        kept: a folder whose kept matrix lists the releases where no index does.

    Raises:
        UpkeepError: there is no such target or tree, or neither an index nor a kept matrix lists the releases.
    """
    chosen = matrix.choose(overlays, target)
    known = matrix.packages([part for parts in chosen.values() for part in parts])
    tables = []
    with ExitStack() as stack:
        opened = [matrix_trees.open_tree(text, known, stack) for text in trees]
        index = stack.enter_context(places.answers())
        files = places.files(index)

        @functools.cache
        def answer(name: str) -> IndexAnswer:
            try:
                return index.get(name)
            except NoNetworkError:
                remembered = matrix_file.answers(matrix_file.read(kept)) if kept and _is_there(kept) else {}
                if name not in remembered:
                    raise
                places.tell(f"{name}: no index; the kept releases of {remembered[name].asked} are read again")
                return remembered[name]

        for name, parts in chosen.items():
            partners = combinations.partners(parts, answer, files, stack)
            table = matrix.table(parts, answer(name), files, pre=pre, tell=places.tell, beside=partners)
            rows = [row for tree in opened if (row := matrix_trees.tree_row(tree, parts, partners))]
            tables.append(replace(table, trees=tuple(rows)))
        files.findings.save()
    return tuple(tables)


def write(tables: Sequence[Table], folder: Path) -> None:
    """Write the matrix and its page to a folder.

    Raises:
        UpkeepError: a release could not be read.
    """
    matrix_file.complete(tables)
    folder.mkdir(parents=True, exist_ok=True)
    text = matrix_file.to_text(tables)
    page = _page(matrix_file.parse(text, str(folder / matrix_file.NAME)))
    files.write({folder / matrix_file.NAME: text.encode(), folder / matrix_file.PAGE: page.encode()})


def check(overlays: Sequence[Erratum], folder: Path, places: Places) -> list[str]:
    """Return the stale entries of a kept matrix, one line each.

    Every release in the matrix is probed again, from the same files, and the page is rendered again. Unless offline,
    the dates and files on the index, and newer releases, count as well.

    Raises:
        UpkeepError: there is no kept matrix, or a file that it was made from is not on this machine.
    """
    kept = matrix_file.read(folder)
    with places.answers() as answers:
        newer: list[str] = []
        if not places.offline:
            newer = [line for table in kept for line in matrix_file.newer(table, answers.get(table.distribution))]
        archives = places.files(answers)
        now = matrix_file.again(kept, overlays, archives, places.tell)
        archives.findings.save()
    found = matrix_file.differences(kept, now, overlays)
    if not found and (folder / matrix_file.NAME).read_text() != matrix_file.to_text(now):
        found.append(
            f"{matrix_file.NAME} differs from the output of --write for these releases: its flips or its order differ"
        )
    page = folder / matrix_file.PAGE
    if not page.exists() or page.read_text() != _page(kept):
        found.append(f"{matrix_file.PAGE} is not made from the {matrix_file.NAME} next to it")
    return found + newer


def _is_there(folder: Path) -> bool:
    return (folder / matrix_file.NAME).exists()


def _page(tables: Sequence[Table]) -> str:
    from megacpp_overlays.upkeep.matrix import matrix_page  # noqa: PLC0415 - a table for a terminal needs no templates

    return matrix_page.render(tables)
