"""Plugin of pytest that leaves out files of tests whose pass is kept, and keeps those that pass: see `kept_passes.py`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kept_passes
import pytest
from places import ROOT

DAILY = "not full"
"""The tests of `make test`, which are the ones that are kept."""
_OPENED = "opened"
_UNCHANGED = "unchanged"


def add_options(parser: pytest.Parser) -> None:
    """Add `--kept` and `--keep`."""
    parser.addoption(
        "--kept", action="store_true", help="leave out files of tests that passed and of which nothing has changed"
    )
    parser.addoption("--keep", action="store_true", help="keep which files passed, in tests/answers/passed.json")


def plugin(config: pytest.Config) -> Passes:
    """Return the plugin of a run.

    Raises:
        pytest.UsageError: only some tests of a file would run, so that the file cannot be kept or left out.
    """
    asked = [each for each in ("--kept", "--keep") if config.getoption(each)]
    if asked and DAILY not in config.getoption("markexpr"):
        raise pytest.UsageError(f"{asked[0]} is about the tests of `make test`: give -m '{DAILY}' with it")
    partial = (
        [each for each in config.args if "::" in each] or config.getoption("keyword") or config.getoption("maxfail")
    )
    if "--keep" in asked and partial:
        raise pytest.UsageError("--keep is about whole files: give no test by its name, no -k and no -x with it")
    leaves_out = "--kept" in asked and not config.getoption("upstream_tree")
    unchanged = getattr(config, "workerinput", {}).get(_UNCHANGED)
    if unchanged is None:
        unchanged = [path for path in kept_passes.kept() if kept_passes.unchanged(path)] if leaves_out else []
    return Passes(frozenset(unchanged), keeps="--keep" in asked)


@dataclass
class Ran:
    """The outcome of the tests of a file."""

    passed: int = 0
    is_red: bool = False
    opened: set[str] = field(default_factory=set)
    """Absolute paths."""


class Passes:
    """Leaves out files whose pass is kept, and keeps new passes."""

    def __init__(self, unchanged: frozenset[str], *, keeps: bool) -> None:
        self._unchanged = unchanged
        self._keeps = keeps
        self._left_out = 0
        self._ran: defaultdict[str, Ran] = defaultdict(Ran)
        self._opened: set[str] = set()
        if keeps:
            sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            self._opened.add(arguments[0])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send a worker of pytest-xdist the files to leave out."""
        node.workerinput[_UNCHANGED] = sorted(self._unchanged)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Import no file that is kept. One that pytest was given by its name is imported, and left out below."""
        return True if str(collection_path.relative_to(ROOT)) in self._unchanged else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests of files that are kept."""
        left_out = [item for item in items if _file(item.nodeid) in self._unchanged]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if _file(item.nodeid) not in self._unchanged]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begin to record the files that a test and its fixtures open."""
        self._opened.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, object, object]:
        """Add to the last report of a test which files of the checkout were opened."""
        if self._keeps and call.when == "teardown":
            item.user_properties.append((_OPENED, [each for each in self._opened if each.startswith(f"{ROOT}/")]))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the reports of a file."""
        ran = self._ran[_file(report.nodeid)]
        ran.passed += report.when == "call" and report.passed
        ran.is_red = ran.is_red or report.failed
        ran.opened.update(path for name, paths in report.user_properties if name == _OPENED for path in paths)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Keep the files that passed, and say how many were left out."""
        if self._keeps:
            number = self._keep()
            terminalreporter.write_line(f"tests/answers/passed.json: {number} files of tests are kept anew")
        elif ran := [path for path in self._ran if self._unchanged and kept_passes.can_be_kept(path)]:
            terminalreporter.write_line(f"{len(ran)} files of tests ran that can be kept: `make passes` keeps them")
        if self._unchanged:
            tests = sum(each.tests for path, each in kept_passes.kept().items() if path in self._unchanged)
            terminalreporter.write_line(
                f"{tests} tests of {len(self._unchanged)} files did not run: they passed, and nothing that they are made of has "
                "changed since; without --kept they run"
            )

    def _keep(self) -> int:
        passes = {}
        for path, ran in self._ran.items():
            if ran.passed and not ran.is_red and kept_passes.can_be_kept(path):
                opened = kept_passes.not_in_key(path, ran.opened)
                passes[path] = kept_passes.Pass(kept_passes.key_of(path, opened), ran.passed, opened)
        kept_passes.keep(passes)
        return len(passes)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
