"""`megacpp-overlays repro`: a sentinel is earned by a measurement that the probe agrees with, and by nothing else.

The packs and the upstream here are made up; the overlay is a plugin, as a user's own would be. Every case runs in the
same child processes as a real one.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import made_up_checkout
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_environments import HONEST, REPRODUCER, Packs, install_here
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from made_up_checkout import Checkout
from places import HANG_S, ROOT
from releases import only
from repositories import commit_all, git
from running import demand_end

from megacpp_overlays import cli
from megacpp_overlays.loader import registry, retired
from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.model import Decision, Target, Verdict
from megacpp_overlays.repro import Behaviour, Case, inventory, manifest, receipts, runner, trees
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.repro.judge import EARNED, Part, Run, RunKind, Sentinel, judge, verdict_of
from megacpp_overlays.repro.transcript import Transcript, paths_in, scrub

UPSTREAM = "made_target"
LAYERS = "made_target.layers"
ABSENT_TEXT = "def other():\n    pass\n"
UNKNOWN_TEXT = BROKEN_TEXT.replace("x + x + 1", "2 * x + 1")


@dataclass(frozen=True)
class Inventory:
    """A folder of packs with one pack, 99-double, and the upstream it is about."""

    folder: Path
    upstream: Upstream

    @property
    def packs(self) -> Path:
        return self.folder / "packs"

    def write(self, body: str = HONEST, *, device: str = "cpu", more: str = "") -> Path:
        reproducer = Packs(self.packs).write(body, device=device, more=more)
        notes = "# Pack 99: double\n\nClass: overlay\n\nLifecycle state: draft\n"
        reproducer.with_name("README.md").write_text(notes)
        return reproducer

    def run(self, *, timeout: float = 60.0, given_tree: Path | None = None) -> Ran:
        reproducer = self.packs / "99-double" / "reproduce.py"
        job = runner.Job(
            reproducer=reproducer,
            cases=inventory.load_cases(reproducer),
            overlays=registry.load(["double"]),
            command="megacpp-overlays repro 99",
            tree=given_tree,
            timeout=timeout,
        )
        transcript = Transcript([], lambda line: None)
        _, code = runner.run(job, transcript)
        return Ran(transcript.text, code)


@dataclass(frozen=True)
class Ran:
    """The output and the exit code of a run."""

    text: str
    code: int

    @property
    def said(self) -> dict[str, str]:
        found = re.findall(rf"^({'|'.join(Sentinel.__members__)}): (.*) \(case double\)$", self.text, re.MULTILINE)
        return dict(found)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An inventory whose overlay is an installed plugin, with a broken upstream."""
    inventory = Inventory(tmp_path, install_here(tmp_path, monkeypatch, BROKEN_TEXT))
    inventory.write()
    return inventory


# Sentinels of a run


MEASURED = {
    "broken": (BROKEN_TEXT, HONEST, {"BUG_REPRODUCED": "double(1) = 3", "FIX_VALIDATED": "double(1) = 2"}, 0),
    "fixed": (FIXED_TEXT, HONEST, {"BUG_NOT_PRESENT": "double(1) = 2"}, 0),
    "absent": (ABSENT_TEXT, HONEST, {"BUG_NOT_PRESENT": "the target is absent: no double"}, 0),
    "unrecognised": (UNKNOWN_TEXT, HONEST, {"FAILED": "the probe says UNRECOGNISED, the behaviour is broken"}, 1),
    "broken, behaves well": (
        BROKEN_TEXT,
        'return Behaviour(broken=False, seen="-")',
        {"FAILED": "says BROKEN, the behaviour is not"},
        1,
    ),
    "fixed, behaves badly": (
        FIXED_TEXT,
        'return Behaviour(broken=True, seen="-")',
        {"FAILED": "says FIXED, the behaviour is broken"},
        1,
    ),
    "absent, behaves": (
        ABSENT_TEXT,
        'return Behaviour(broken=False, seen="-")',
        {"FAILED": "says ABSENT, the behaviour is not"},
        1,
    ),
    "fixed, absent": (FIXED_TEXT, 'raise TargetAbsent("-")', {"FAILED": "says FIXED, the behaviour is absent"}, 1),
    "the fix does not fix": (
        BROKEN_TEXT,
        'double()\nreturn Behaviour(broken=True, seen="always")',
        {"BUG_REPRODUCED": "always", "FAILED": "with every overlay: broken: always"},
        1,
    ),
    "sound without the overlay being active": (
        BROKEN_TEXT,
        'off = "double-fix" in os.environ.get("MEGACPP_OVERLAYS_DISABLE", "")\n'
        'return Behaviour(broken=off, seen="made up")',
        {"BUG_REPRODUCED": "made up", "FAILED": "the overlay is not active: made_target.layers armed"},
        1,
    ),
    "raises": (BROKEN_TEXT, 'raise RuntimeError("of upstream")', {"FAILED": "RuntimeError: of upstream"}, 1),
    "returns nonsense": (BROKEN_TEXT, 'return "broken"', {"FAILED": "the case returned str, not a Behaviour"}, 1),
    "segmentation fault": (BROKEN_TEXT, "os.kill(os.getpid(), signal.SIGSEGV)", {"FAILED": "killed by signal 11"}, 1),
    "exits": (BROKEN_TEXT, 'print("bye", flush=True); os._exit(7)', {"FAILED": "ended with exit code 7: bye"}, 1),
    "exits without an answer": (BROKEN_TEXT, "os._exit(0)", {"FAILED": "ended without an answer"}, 1),
    "blocked": (BROKEN_TEXT, 'raise Blocked("no such device")', {"BLOCKED": "no such device"}, 3),
}
"""The text of the upstream, the body of the case, the sentinels and the exit code."""


@pytest.mark.parametrize(
    ("text", "body", "says", "code"),
    only(
        MEASURED.values(),
        [
            MEASURED[each]
            for each in (
                "broken",
                "fixed",
                "broken, behaves well",
                "the fix does not fix",
                "sound without the overlay being active",
                "segmentation fault",
                "blocked",
            )
        ],
    ),
    ids=MEASURED,
)
def test_a_sentinel_is_printed_only_when_probe_and_measurement_agree(
    made: Inventory, text: str, body: str, says: dict[str, str], code: int
) -> None:
    made.upstream.write(text)
    made.write(body)

    ran = made.run()

    assert (list(ran.said), ran.code) == (list(says), code), ran.text
    assert all(says[name] in reason for name, reason in ran.said.items()), ran.text


def test_a_crash_shows_the_defect_only_where_the_case_says_so(made: Inventory) -> None:
    made.write(
        'if double() != 2: os.abort()\nreturn Behaviour(broken=False, seen="alive")', more=", crash_is_broken=True"
    )

    ran = made.run()

    assert list(ran.said) == ["BUG_REPRODUCED", "FIX_VALIDATED"], ran.text
    assert "killed by signal 6" in ran.said["BUG_REPRODUCED"]


def test_a_crash_before_the_measurement_shows_nothing(made: Inventory) -> None:
    reproducer = made.write(more=", crash_is_broken=True")
    reproducer.write_text(reproducer.read_text() + '\nif "megacpp_overlays.repro.child" in sys.orig_argv: os.abort()\n')

    assert list(made.run().said) == ["FAILED"]


def test_a_run_that_hangs_is_ended_with_all_its_processes(made: Inventory, tmp_path: Path) -> None:
    made.write(
        f'child = subprocess.Popen(["sleep", "300"])\nopen({str(tmp_path / "pid")!r}, "w").write(str(child.pid))\n'
        "time.sleep(300)"
    )

    ran = made.run(timeout=3.0)

    assert list(ran.said) == ["FAILED"]
    assert "without the overlay: the process took more than 3 seconds" in ran.said["FAILED"]
    demand_end((tmp_path / "pid").read_text())


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_cuda_case_is_blocked_without_a_device_and_still_probed(
    made: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made.write('raise RuntimeError("must not run")', device="cuda")

    ran = made.run()

    assert (ran.said, ran.code) == ({"BLOCKED": "needs a CUDA device"}, 3)
    assert "probe of made_target.layers: BROKEN, shape off-by-one: return x + x + 1 (layers.py:" in ran.text


def test_a_target_that_is_not_installed_blocks_the_case(made: Inventory) -> None:
    (made.folder / UPSTREAM).rename(made.folder / "elsewhere")

    assert made.run().said == {"BLOCKED": f"{UPSTREAM} is not installed"}


def test_output_of_upstream_is_kept_and_cannot_forge_a_sentinel(made: Inventory) -> None:
    made.write('print("FIX_VALIDATED: forged (case double)")\nprint("{}")\nraise Blocked("here")')

    ran = made.run()

    assert ran.said == {"BLOCKED": "here"}
    assert "    | FIX_VALIDATED: forged (case double)" in ran.text


def test_the_first_line_stamps_hardware_and_versions_and_no_name_of_the_host(made: Inventory) -> None:
    lines = made.run().text.splitlines()

    assert lines[0].startswith(f"host: {platform.machine()}, ")
    assert f"Python {platform.python_version()}" in lines[0]
    assert re.search(r"versions: megacpp-overlays \S+ \([0-9a-f]{12}\), made_target \S.*, packaging \d+", lines[0])
    assert lines[1] == "$ megacpp-overlays repro 99"
    assert lines[-1] == "exit code 0"
    assert str(made.folder) not in "\n".join(lines)
    assert platform.node() not in re.split(r"[\s,]", lines[0])


def test_a_case_that_needs_torch_is_blocked_where_there_is_none(made: Inventory) -> None:
    made.write('raise ModuleNotFoundError("No module named torch", name="torch")')

    assert made.run().said == {"BLOCKED": "torch is not installed"}


def test_a_log_that_was_cut_says_so(made: Inventory) -> None:
    made.write('print("x\\n" * 400)\nraise Blocked("here")')

    text = made.run().text

    assert re.search(r"^    \| \(\d+ lines before this one were left out\)$", text, re.MULTILINE)
    assert text.count("    | ") == 301


def test_a_host_that_is_named_like_one_of_our_words_changes_none_of_them(
    made: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", functools.partial(str, "double"))

    ran = made.run()

    assert list(ran.said) == ["BUG_REPRODUCED", "FIX_VALIDATED"], ran.text
    assert "case double (overlay double-fix): cpu" in ran.text
    assert ran.said["BUG_REPRODUCED"] == "HOST(1) = 3"


# A word of the pack's own


OWN_WORD = ', fix_sentinel="MEMORY_SAVE_VERIFIED"'


def test_a_case_may_have_its_own_word_for_a_fix_that_is_shown(made: Inventory) -> None:
    made.write(more=OWN_WORD)

    ran = made.run()

    assert "case double (overlay double-fix, fix shown by MEMORY_SAVE_VERIFIED): cpu\n" in ran.text
    assert "MEMORY_SAVE_VERIFIED: double(1) = 2 (case double)\n" in ran.text
    assert (list(ran.said), ran.code) == (["BUG_REPRODUCED"], 0), ran.text


def test_its_own_word_is_said_of_nothing_but_a_fix(made: Inventory) -> None:
    made.write(more=OWN_WORD)
    made.upstream.write(FIXED_TEXT)
    fixed = made.run()
    made.upstream.write(UNKNOWN_TEXT)
    unknown = made.run()

    assert (list(fixed.said), list(unknown.said)) == (["BUG_NOT_PRESENT"], ["FAILED"])
    assert not re.search("^MEMORY_SAVE_VERIFIED", fixed.text + unknown.text, re.MULTILINE)


def test_a_receipt_with_its_own_word_is_proof_of_the_fix(made: Inventory) -> None:
    made.write(more=OWN_WORD)
    done = command(made, "99", "--keep", str(made.packs))
    assert done.returncode == 0, done.stdout + done.stderr
    notes = made.packs / "99-double" / "README.md"
    notes.write_text(notes.read_text().replace("draft", "validated"))
    overlays = registry.load(["double"])
    manifest.write(made.packs, manifest.synchronise(made.packs, overlays))

    claims = manifest.read(made.packs)["packs"][0]["receipts"][0]["claims"]

    assert [claim["sentinel"] for claim in claims] == ["BUG_REPRODUCED", "MEMORY_SAVE_VERIFIED"]
    assert [*receipts.problems(made.packs), *manifest.problems(made.packs, overlays)] == []


# A regression guard: the overlay was retired, and its reproducer stays


GONE = RetiredOverlay(
    "double-fix", 99, "2026-11-21", "made-target", "2.0", "-", (Target("made-target", LAYERS, "double"),), ()
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A copy of this package in which `double-fix` was retired, with the pack that it had."""
    made = made_up_checkout.make(tmp_path_factory.mktemp("guarded"))
    for name in ("overlays/double_fix.py", "feature_probes/double_fix.py"):
        (made.root / name).unlink()
    (made.root / "megacpp_overlays/loader/retired.json").write_text(retired.to_json([GONE]))
    return made


def guard(checkout: Checkout, upstream: str | None, folder: Path) -> tuple[int, str]:
    """Run the guard on an upstream that is given as a tree, or on none; return the exit code and the output."""
    if upstream is None:
        done = checkout.run("repro", "99", "--case", "double")
    else:
        made = Upstream(UPSTREAM, folder)
        made.write(upstream)
        done = checkout.run("repro", "99", "--case", "double", "--tree", str(folder))
    return done.returncode, done.stdout


GUARDED = {
    "sound": (FIXED_TEXT, 0, "BUG_NOT_PRESENT: double(1) = 2 (case double)"),
    "absent": (ABSENT_TEXT, 0, "BUG_NOT_PRESENT: the target is absent: no double (case double)"),
    "broken": (
        BROKEN_TEXT,
        1,
        "FAILED: the bug is back, or this release never had the repair: double-fix was retired on ",
    ),
    "broken in a new way": (UNKNOWN_TEXT, 1, "FAILED: the bug is back"),
    "does not import": ("1 / 0", 1, "FAILED: ZeroDivisionError: division by zero (case double)"),
    "not installed": (None, 3, "BLOCKED: made-target is not installed (case double)"),
}
"""The text of the upstream, the exit code of a guard, and its output."""


@pytest.mark.parametrize(
    ("upstream", "code", "says"),
    only(GUARDED.values(), [GUARDED[each] for each in ("sound", "broken", "not installed")]),
    ids=GUARDED,
)
def test_a_guard_measures_upstream_once_and_says_whether_the_bug_is_back(
    guarded: Checkout, tmp_path: Path, upstream: str | None, code: int, says: str
) -> None:
    found, text = guard(guarded, upstream, tmp_path)

    assert found == code, text
    assert f"\n{says}" in text
    assert text.count("upstream alone: ") == 1
    assert "with every overlay: " not in text
    assert ("made-target from --tree" in text.splitlines()[0]) == (upstream is not None)


def test_a_guard_of_a_tree_looks_at_that_tree(guarded: Checkout, tmp_path: Path) -> None:
    half = tmp_path / "half" / UPSTREAM  # without __init__.py: the package below wins
    half.mkdir(parents=True)
    (half / "layers.py").write_text(FIXED_TEXT)
    Upstream(UPSTREAM, tmp_path).write(FIXED_TEXT)
    path = os.pathsep.join([str(guarded.root), str(tmp_path)])

    done = guarded.run("repro", "99", "--case", "double", "--tree", str(half.parent), PYTHONPATH=path)

    assert done.returncode == 1
    assert "FAILED: made_target.layers does not come from --tree" in done.stdout


def test_a_case_names_targets_of_its_retired_overlay_or_it_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retired, "read", lambda: (GONE,))
    case = Case(name="double", overlay="double-fix", device="cpu", versions=(), run=Behaviour)

    assert inventory.parts_of(case, ()) == ()
    assert inventory.targets_of(case, ()) == GONE.targets
    with pytest.raises(PackError, match=r"double-fix has no target made_target\.other"):
        inventory.targets_of(replace(case, targets=("made_target.other",)), ())
    with pytest.raises(PackError, match="case double: there is no overlay double-repair"):
        inventory.targets_of(replace(case, overlay="double-repair"), ())


# Source trees


def test_a_tree_wins_over_the_installed_package_and_is_named_by_its_content(made: Inventory, tmp_path: Path) -> None:
    other = Upstream(UPSTREAM, tmp_path / "checkout")
    other.folder.mkdir()
    other.write(FIXED_TEXT)

    ran = made.run(given_tree=other.folder)

    assert list(ran.said) == ["BUG_NOT_PRESENT"], ran.text
    assert f"{UPSTREAM} from --tree" in ran.text
    assert ran.text.splitlines()[0].endswith(f"tree: {UPSTREAM} {trees.tree_id(other.folder / UPSTREAM)[:12]}")
    assert str(other.folder) not in ran.text


def test_a_tree_that_the_process_does_not_import_from_is_a_failure(made: Inventory, tmp_path: Path) -> None:
    half = tmp_path / "half" / UPSTREAM  # no __init__.py: the installed package, which has one, wins
    half.mkdir(parents=True)
    (half / "layers.py").write_text(FIXED_TEXT)

    ran = made.run(given_tree=half.parent)

    assert list(ran.said) == ["FAILED"]
    assert "made_target.layers does not come from --tree" in ran.said["FAILED"]


@pytest.mark.parametrize("below", ["", UPSTREAM, f"{UPSTREAM}/foo"], ids=["nothing", "no file", "no file below"])
def test_a_tree_without_a_file_of_the_package_is_refused(made: Inventory, tmp_path: Path, below: str) -> None:
    (tmp_path / "hollow" / below).mkdir(parents=True)

    with pytest.raises(PackError, match="no package folder of this pack, such as made_target"):
        made.run(given_tree=tmp_path / "hollow")


def test_an_absent_target_must_be_absent_from_the_tree(made: Inventory, tmp_path: Path) -> None:
    made.upstream.write(ABSENT_TEXT)
    made.upstream.write("", module="other")
    (
        made.folder / UPSTREAM / "layers.py"
    ).unlink()  # absent from the installed package, which would be probed without a tree
    made.write('raise TargetAbsent("no layers")')
    half = tmp_path / "half" / UPSTREAM
    half.mkdir(parents=True)
    (half / "other.py").write_text("")

    ran = made.run(given_tree=half.parent)

    assert list(ran.said) == ["FAILED"], ran.text
    assert "made_target.layers does not come from --tree" in ran.said["FAILED"]


@pytest.mark.parametrize("files", [["megatron/energon/__init__.py"], ["megatron/__init__.py"]])
def test_a_namespace_that_others_share_is_not_the_package(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert package_of_megatron(tmp_path) == "None"

    for file in ("megatron/core/__init__.py", "megatron/core/x.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert package_of_megatron(tmp_path) == str(tmp_path / "megatron/core/__init__.py")


def package_of_megatron(folder: Path) -> str:
    """Return where a process that has this folder and no other finds megatron-core."""
    code = (
        "import sys\n"
        "from megacpp_overlays.model import Target\n"
        "from megacpp_overlays.repro.child import _package\n"
        f"sys.path[:] = [{str(folder)!r}]\n"
        "print(_package(Target('megatron-core', 'megatron.core.x', 'f')))"
    )
    words = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_a_tree_may_hold_its_package_as_a_link(made: Inventory, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    Upstream(UPSTREAM, tmp_path / "real").write(FIXED_TEXT)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / UPSTREAM).symlink_to(tmp_path / "real" / UPSTREAM)

    ran = made.run(given_tree=tmp_path / "tree")

    assert list(ran.said) == ["BUG_NOT_PRESENT"], ran.text


def test_a_stand_in_is_stamped_as_one(made: Inventory, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    Upstream(UPSTREAM, tmp_path / "tree").write(FIXED_TEXT)
    (tmp_path / "tree" / trees.MARKER).write_text("made-spring is a stand-in\n")

    ran = made.run(given_tree=tmp_path / "tree")

    assert re.search(r" \| stand-in made-spring: made_target [0-9a-f]{12}$", ran.text.splitlines()[0])
    assert "tree: " not in ran.text.splitlines()[0]


def test_a_stand_in_that_is_not_named_with_tree_is_a_failure(made: Inventory) -> None:
    (made.folder / trees.MARKER).write_text("made-spring\n")

    ran = made.run()

    assert "comes from a stand-in, which must be given with --tree" in ran.said["FAILED"]


def test_every_stand_in_of_the_tests_is_marked_with_its_name() -> None:
    folders = [path for path in (ROOT / "tests" / "stand_ins").iterdir() if path.is_dir() and path.name[0] not in "._"]

    assert folders
    assert {path.name: trees.stand_in_of(path / "megatron" / "core" / "__init__.py") for path in folders} == {
        path.name: path.name for path in folders
    }


def test_the_commit_of_a_tree_is_not_that_of_a_repository_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    commit = commit_all(tmp_path)[:12]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))

    assert trees.describe(tmp_path, ["package"])["commit"] == commit


def test_the_name_of_a_tree_is_the_one_that_git_gives_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    for name, text in {"__init__.py": "", "a/b.py": "x = 1\n", "a.py": "y\n", "a0/c.txt": "z", "run.sh": "#!"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (package / "run.sh").chmod(0o755)
    (package / "link").symlink_to("a.py")
    (package / "empty").mkdir()
    commit = commit_all(tmp_path)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"\0")

    described = trees.describe(tmp_path, ["package", "missing"])

    assert trees.tree_id(package) == git(tmp_path, "rev-parse", "HEAD:package")
    assert described == {
        "package": git(tmp_path, "rev-parse", "HEAD:package")[:12],
        "commit": commit[:12],
    }
    (package / "a.py").write_text("changed\n")
    assert trees.describe(tmp_path, ["package"])["commit"].endswith(" modified")
    assert "commit" not in trees.describe(package, ["a"])  # its top is another folder


# The judgement, over every combination

RUNS = st.builds(
    Run,
    kind=st.sampled_from(RunKind),
    seen=st.just("numbers"),
    parts=st.lists(
        st.builds(
            Part,
            module=st.just("target"),
            verdict=st.sampled_from(Verdict),
            shape=st.none(),
            evidence=st.just("seen"),
            decision=st.one_of(st.none(), st.sampled_from(Decision)),
            reason=st.just("why"),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
)


@given(without=RUNS, with_all=st.one_of(st.none(), RUNS))
def test_no_combination_earns_a_sentinel_that_was_not_shown(without: Run, with_all: Run | None) -> None:
    said = [each.sentinel for each in judge(without, with_all)]

    verdict = verdict_of(without.parts)
    assert said
    if Sentinel.BUG_REPRODUCED in said:
        assert (without.kind, verdict) == (RunKind.BROKEN, Verdict.BROKEN)
    if Sentinel.FIX_VALIDATED in said:
        assert said == [Sentinel.BUG_REPRODUCED, Sentinel.FIX_VALIDATED]
        assert with_all is not None
        assert with_all.kind is RunKind.SOUND
        active = [part for part in with_all.parts if part.decision is Decision.ACTIVE]
        assert any(part.verdict is Verdict.BROKEN for part in active)
        assert not any(part.decision is Decision.CONFLICT for part in with_all.parts)
    if Sentinel.BUG_NOT_PRESENT in said:
        assert said == [Sentinel.BUG_NOT_PRESENT]
        assert (verdict, without.kind) in {(Verdict.FIXED, RunKind.SOUND), (Verdict.ABSENT, RunKind.ABSENT)}
    if verdict is Verdict.UNRECOGNISED or without.kind in {RunKind.FAILED, RunKind.BLOCKED}:
        assert not EARNED & set(said)
    if any(part.decision is Decision.ACTIVE for part in without.parts):
        assert not EARNED & set(said)
    assert (Sentinel.BLOCKED in said) == (without.kind is RunKind.BLOCKED)
    assert runner.exit_code(said) == (1 if Sentinel.FAILED in said else 0 if EARNED & set(said) else 3)


@given(st.lists(st.sampled_from(Verdict), min_size=1))
def test_one_broken_part_is_enough_to_be_broken_and_an_unknown_one_hides_no_other_answer(
    verdicts: list[Verdict],
) -> None:
    parts = [
        Part(module="m", verdict=verdict, shape=None, evidence="-", decision=None, reason="") for verdict in verdicts
    ]
    order = [Verdict.BROKEN, Verdict.UNRECOGNISED, Verdict.FIXED, Verdict.ABSENT]

    assert verdict_of(parts) is min(verdicts, key=order.index)


# Declarations


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "Two Words"}, "is not lower-case words joined by hyphens"),
        ({"device": "tpu"}, "is neither cpu nor cuda"),
        ({"environment": {"MEGACPP_OVERLAYS": "off"}}, "is set by the runner"),
        ({"fix_sentinel": "Memory saved"}, "is not upper-case words joined by underscores"),
        ({"fix_sentinel": "MEMORY_SAVED_"}, "is not upper-case words joined by underscores"),
        ({"fix_sentinel": "BUG_NOT_PRESENT"}, "BUG_NOT_PRESENT means something else"),
        ({"fix_sentinel": "FAILED"}, "FAILED means something else"),
    ],
)
def test_a_case_that_cannot_be_meant_is_refused(changes: dict[str, object], says: str) -> None:
    fields: dict[str, object] = {"name": "a", "overlay": "b", "device": "cpu", "versions": ()}
    with pytest.raises(ValueError, match=says):
        Case(**{**fields, "run": lambda: Behaviour(broken=True, seen="-"), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError"),
        ("CASES = ()", "declares no CASES"),
        ("CASES = [1]", "declares no CASES"),
        (REPRODUCER.format(body="    pass", device="cpu", more="") + "CASES += CASES", "declares 2 cases double"),
    ],
)
def test_a_reproducer_that_is_none_is_refused(made: Inventory, text: str, says: str) -> None:
    reproducer = made.write()
    reproducer.write_text(text)
    before = list(sys.path)

    with pytest.raises(PackError, match=says):
        inventory.load_cases(reproducer)
    assert sys.path == before


def test_two_packs_with_one_number_are_refused(made: Inventory) -> None:
    (made.packs / "99-treble").mkdir()

    with pytest.raises(PackError, match="2 packs have the number 99"):
        inventory.list_packs(made.packs)


def test_a_case_about_an_overlay_that_is_not_there_is_refused(made: Inventory) -> None:
    reproducer = made.write()
    reproducer.write_text(reproducer.read_text().replace("double-fix", "treble-fix"))

    with pytest.raises(PackError, match="case double: there is no overlay treble-fix"):
        made.run()


def test_a_case_about_one_part_is_judged_by_that_part(made: Inventory) -> None:
    made.write(more=', targets=("made_target.layers",)')
    assert list(made.run().said) == ["BUG_REPRODUCED", "FIX_VALIDATED"]

    made.write(more=', targets=("made_target.missing",)')
    with pytest.raises(PackError, match=r"double-fix has no target made_target\.missing"):
        made.run()


# The command


def command(made: Inventory, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "megacpp_overlays", "repro", "--packs", str(made.packs), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S)


def test_the_command_runs_one_case_and_exits_with_its_code(made: Inventory) -> None:
    done = command(made, "99", "--case", "double")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("host: ")
    assert lines[1] == "$ megacpp-overlays repro 99 --case double"
    assert [line.split(":")[0] for line in lines if line.endswith("(case double)")] == [
        "BUG_REPRODUCED",
        "FIX_VALIDATED",
    ]


def test_the_command_lists_packs_and_cases_and_runs_nothing(
    made: Inventory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["repro", "--list", "--packs", str(made.packs)]) == 0
    assert cli.main(["repro", "--list", "99", "--packs", str(made.packs)]) == 0

    assert capsys.readouterr().out == 2 * "99-double\n  double: overlay double-fix, cpu\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which pack?"),
        (["12"], "there is no pack 12; `megacpp-overlays repro --list` lists the 1 that there are"),
        (["99", "--case", "treble"], "there is no case treble; known: double"),
        (["99", "--tree", "/nowhere/at/all"], "--tree: there is no such folder"),
        (["99", "--tree", "colon:ed"], "cannot be on the path of a process"),
        (["99", "--keep", "/proc/nowhere"], "--keep: /proc/nowhere cannot be written"),
        (["--list", "--packs", "/nowhere/at/all"], "--packs: there is no such folder"),
        (["ninety"], "there is no overlay ninety"),
    ],
)
def test_wrong_usage_exits_2_and_lists_the_known_names(
    made: Inventory,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "colon:ed").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["repro", "--packs", str(made.packs), *arguments])

    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_asked_to_end_leaves_nothing(made: Inventory, tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    made.write(f'open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))\ntime.sleep(300)')
    words = [sys.executable, "-m", "megacpp_overlays", "repro", "--packs", str(made.packs), "99"]
    env = {**os.environ, "TMPDIR": str(temporary)}

    # Under `nohup` the tests ignore SIGHUP, and their child processes would, too.
    heeded = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeded) as process:
        written = tmp_path / "pid"
        assert wait_until(lambda: written.exists() and bool(written.read_text()))
        process.send_signal(number)
        process.communicate(timeout=HANG_S)

    assert process.returncode == 128 + number
    demand_end(written.read_text())
    assert list(temporary.iterdir()) == []


# Kept output has no paths of the machine

NAMES = st.text("abcxyz019_.-", min_size=1, max_size=8).filter(lambda name: not set(name) <= {".", "-"})


@given(st.lists(NAMES, min_size=2, max_size=6), st.sampled_from(["", "-I", "file://", "PATH=", '"', "(", "at "]))
def test_no_absolute_path_is_left(names: list[str], before: str) -> None:
    text = scrub(f"{before}/{'/'.join(names)}: error")

    assert not paths_in(text)
    assert names[-1].rstrip(".") in text


@pytest.mark.parametrize(
    "text",
    [
        "see https://example.org/a/b/c",
        "megatron/core/x.py:12",
        "1/2/3 and a/b",
        "../up/and/down",
        "./here/it/is",
        "a / b / c",
    ],
)
def test_text_without_an_absolute_path_stays(text: str) -> None:
    assert scrub(text) == text


def test_files_of_known_folders_keep_their_names_from_there_on(tmp_path: Path) -> None:
    text = scrub(f'File "{tmp_path}/tree/megatron/core/x.py", line 3, and {tmp_path}/other/y.py', [tmp_path / "tree"])

    assert text == 'File "megatron/core/x.py", line 3, and .../y.py'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("at node7.hpc.example.com:29500", "at HOST:29500"),
        ("node7: ready", "HOST: ready"),
        ("listening on [node7.hpc.example.com]:29500", "listening on [HOST]:29500"),
        ("in hpc.example.com", "in HOST"),
        ("http://node7/a/b/c", "http://HOST/a/b/c"),
        ("tcp://10.1.2.3:29500, 127.0.0.1", "tcp://ADDRESS:29500, 127.0.0.1"),
        ("torchinductor_alice", "torchinductor_USER"),
        ("malice of alices", "malice of alices"),
        ("-isystem/srv/home/alice/include/x", "-isystem.../x"),
        ("'a\\n/srv/other/x.py'", "'a\\n.../x.py'"),
        ("\x1b[31m/srv/other/x.py\x1b[0m", ".../x.py"),
        ("../../home/bob/x.py", ".../x.py"),
        ('File "/srv/my data/x y.py"', 'File ".../x y.py"'),
        ("home is /srv/home/alice.", "home is ...."),
        ("a lone \udc80", "a lone \\udc80"),
    ],
)
def test_names_of_host_user_and_place_are_taken_out(text: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", functools.partial(str, "node7.hpc.example.com"))
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("HOME", "/srv/home/alice")

    assert scrub(text) == kept
    assert not paths_in(scrub(text))


def test_a_short_host_name_is_a_word_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", functools.partial(str, "box"))

    assert scrub("a box at http://box/a/b/c") == "a box at http://box/a/b/c"
    assert not paths_in(scrub("http://box/a/b/c"))
