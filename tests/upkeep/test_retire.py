"""`megacpp-overlays retire`: a commit is prepared when upstream is shown to be right, and nothing is touched otherwise.

The checkout is made up, and everything in it is real; see `made_up_checkout`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from made_up_checkout import ID, VARIABLE, Checkout, make
from places import ROOT

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.retire.working_tree import Change, WorkingTree

TAKEN_OVER = {
    "M CHANGELOG.md",
    "M README.md",
    "M RETIREMENT.md",
    "D feature_probes/double_fix.py",
    "M megacpp_overlays/loader/retired.json",
    "D overlays/double_fix.py",
    "M packs/99-double/README.md",
    "M packs/manifest.json",
    "D tests/gpu/test_double_fix_on_gpu.py",
    "D tests/test_double_fix.py",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A committed checkout with the lanes `fixed` and `broken`."""
    made = make(tmp_path_factory.mktemp("template"))
    made.lane("fixed", "2.0")
    made.lane("broken", "1.0", environment=False)
    made.commit()
    return made


@pytest.fixture
def checkout(template: Checkout, tmp_path: Path) -> Checkout:
    """A checkout of one's own."""
    shutil.copytree(template.root, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout")


def retire(
    checkout: Checkout, *arguments: str, lane: str = "fixed", **variables: str
) -> subprocess.CompletedProcess[str]:
    return checkout.run("retire", ID, "--lock", f"locks/{lane}.txt", *arguments, **variables)


def checklist(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return the items of a run with --json: how each ended, and what it says."""
    assert done.stdout, done.stderr
    return {item["item"]: (item["state"], item["said"]) for item in json.loads(done.stdout)["checklist"]}


# What is prepared


@pytest.fixture(scope="module")
def prepared(template: Checkout, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, str]:
    """A checkout in which the overlay was retired, and what the command printed."""
    root = tmp_path_factory.mktemp("prepared") / "checkout"
    shutil.copytree(template.root, root, symlinks=True)
    made = Checkout(root)
    done = retire(made, "--leave", "broken")
    assert done.returncode == 0, done.stdout + done.stderr
    return made, done.stdout


def test_exactly_what_the_overlay_owned_goes_and_its_history_comes(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    new = {line for line in made.status if line.startswith("??")}
    assert made.status - new == TAKEN_OVER
    assert len(new) == 1
    assert new.pop().startswith("?? packs/99-double/receipts/")


def test_ledger_and_receipts_are_in_step_afterwards(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    assert made.run("ledger", "--check", "RETIREMENT.md").returncode == 0
    assert made.run("receipts", "--check").returncode == 0
    assert "| `double-fix` | 99 |" in (made.root / "RETIREMENT.md").read_text()
    assert "## double-fix" not in (made.root / "RETIREMENT.md").read_text()


def test_the_pack_becomes_a_regression_guard_with_its_targets_and_threads(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    [pack] = json.loads((made.root / "packs/manifest.json").read_text())["packs"]
    assert (pack["class"], pack["state"], pack["overlays"]) == ("regression guard", "retired", [])
    assert [target["symbol"] for target in pack["targets"]] == ["double"]
    assert [thread["number"] for thread in pack["threads"]] == [7]
    assert [claim["sentinel"] for claim in pack["receipts"][0]["claims"]] == ["BUG_NOT_PRESENT"]


def test_people_are_told_in_the_changelog_and_the_readme(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    changelog = (made.root / "CHANGELOG.md").read_text()
    assert (
        "### Added\n\n- Something.\n\n### Removed\n\n- Overlay `double-fix` (pack 99): made-target 2.0 is" in changelog
    )
    assert "Unpatched from here on: `broken` (made-target 1.0)" in " ".join(changelog.split())
    assert "| `double-fix` |" not in (made.root / "README.md").read_text()
    assert "| `other-fix` |" in (made.root / "README.md").read_text()


def test_what_a_person_must_finish_is_listed_with_file_and_line(prepared: tuple[Checkout, str]) -> None:
    _, said = prepared

    for line in (
        "README.md:11: `MEGACPP_OVERLAY_DOUBLE_FIX=off` switches it off.",
        "packs/99-double/README.md:10: `tests/test_double_fix.py`",
        'tests/test_all.py:1: IDS = {"double-fix"}',
        "megacpp_overlays/kernels/doubling.py",
    ):
        assert f"\n  {line}\n" in said
    assert "git add -A && git commit -m 'Retire double-fix: made-target 2.0 is right without it'" in said


def test_a_launcher_that_still_switches_it_off_starts_with_a_word(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    done = made.python("-c", "import megacpp_overlays; print(megacpp_overlays.audit())", **{VARIABLE: "off"})

    assert done.returncode == 0
    assert f"{ID} was retired on " in done.stderr
    assert f"with made-target 2.0: {VARIABLE} does nothing and can go" in done.stderr
    assert ID not in done.stdout


def test_a_launcher_that_still_undoes_it_goes_on_with_a_word(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    done = made.python("-c", f"import megacpp_overlays; megacpp_overlays.undo({ID!r}); print('trains')")

    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
    assert f"{ID} was retired on " in done.stderr


def test_its_reproducer_guards_every_lane(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared
    made.lane("broken", "1.0")

    sound = made.python("-m", "megacpp_overlays", "repro", "99", interpreter=made.interpreter("fixed"))
    broken = made.python("-m", "megacpp_overlays", "repro", "99", interpreter=made.interpreter("broken"))

    assert sound.returncode == 0, sound.stdout
    assert "BUG_NOT_PRESENT: double(1) = 2 (case double)" in sound.stdout
    assert broken.returncode == 1
    assert "FAILED: the bug is back, or this release never had the repair: double-fix was retired on" in broken.stdout


def test_a_second_retirement_says_when_the_first_was(prepared: tuple[Checkout, str]) -> None:
    made, _ = prepared

    done = retire(made)

    assert done.returncode == 1
    assert f"megacpp-overlays: {ID} was retired on " in done.stderr


def test_the_commit_can_be_made_and_leaves_nothing_behind(checkout: Checkout) -> None:
    (checkout.root / "notes.txt").write_text("mine")
    done = retire(checkout, "--leave", "broken")
    assert done.returncode == 0, done.stdout + done.stderr
    command = done.stdout.rstrip().splitlines()[-1].strip()

    type_in(checkout, command)

    assert checkout.status == {"?? notes.txt"}  # what was there before is not in the commit
    assert checkout.git("log", "-1", "--format=%s").strip() == "Retire double-fix: made-target 2.0 is right without it"


def type_in(checkout: Checkout, command: str) -> None:
    """Run the printed command, as nobody in particular."""
    identity = "git -c user.name=Nobody -c user.email=nobody@example.com commit -q"
    subprocess.run(command.replace("git commit", identity), shell=True, check=True, cwd=checkout.root)


def test_what_was_staged_before_stays_staged_and_out_of_the_commit(checkout: Checkout) -> None:
    (checkout.root / "notes.txt").write_text("mine")
    (checkout.root / "tests/test_all.py").unlink()
    checkout.git("add", "-A")
    done = retire(checkout, "--leave", "broken")
    assert done.returncode == 0, done.stdout + done.stderr

    type_in(checkout, done.stdout.rstrip().splitlines()[-1].strip())

    assert checkout.status == {"A notes.txt", "D tests/test_all.py"}
    committed = set(checkout.git("show", "--name-status", "--no-renames", "--format=").replace("\t", " ").splitlines())
    assert committed >= TAKEN_OVER
    assert {line[:2] for line in committed - TAKEN_OVER} == {"A "}  # the receipt


def test_a_dry_run_shows_the_change_and_makes_none(checkout: Checkout) -> None:
    done = retire(checkout, "--leave", "broken", "--dry-run")

    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.status == set()
    assert "--- a/overlays/double_fix.py\n+++ /dev/null\n" in done.stdout
    assert "\n-| `double-fix` | double adds one |\n" in done.stdout
    assert '\n+        why="every supported made-target doubles without adding one",\n' in done.stdout


def test_one_of_two_overlays_leaves_the_pack_as_it_is(checkout: Checkout) -> None:
    overlay = (checkout.root / "overlays/double_fix.py").read_text()
    other = overlay.replace('"double-fix"', '"other-fix"').replace('symbol="double", make', 'symbol="other", make')
    notes = (checkout.root / "packs/99-double/README.md").read_text()
    checkout.write(
        {
            "overlays/double_fix_more.py": other,
            "tests/test_double_fix_more.py": "",
            "packs/99-double/README.md": notes.replace("`double-fix` |", "`double-fix`, `other-fix` |"),
        }
    )
    for arguments in (["ledger", "--write", "RETIREMENT.md"], ["receipts", "--sync"]):
        assert checkout.run(*arguments).returncode == 0
    checkout.commit()

    done = retire(checkout, "--leave", "broken")

    assert done.returncode == 0, done.stdout + done.stderr
    # The probe and the kernel have another user, and the test is the other overlay's.
    gone = {"D overlays/double_fix.py", "D tests/test_double_fix.py", "D tests/gpu/test_double_fix_on_gpu.py"}
    assert {line for line in checkout.status if line.startswith("D")} == gone
    assert "nobody imports" not in done.stdout
    rewritten = (checkout.root / "packs/99-double/README.md").read_text()
    assert (
        "| Class | overlay |\n| Lifecycle state | draft |\n| Overlay | `other-fix`; `double-fix` retired " in rewritten
    )


def test_the_release_that_repaired_it_comes_from_a_kept_matrix(checkout: Checkout) -> None:
    flips = [
        {"overlay": ID, "before": "BROKEN", "after": "FIXED", "release": release, "date": None}
        for release in ("0.9", "1.5", "2.1")
    ]
    matrix = {"schema": 1, "distributions": [{"distribution": "made-target", "flips": flips}]}
    for folder in ("packs", "pages"):
        checkout.write({f"{folder}/matrix.json": json.dumps(matrix), f"{folder}/matrix.html": "double-fix"})
    (checkout.root / "locks/broken.txt").unlink()
    checkout.commit()

    done = retire(checkout)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m 'Retire double-fix: made-target 1.5 is right without it'" in done.stdout
    write_again = "  make matrix\n  megacpp-overlays matrix --archives .cache/wheels --write pages\n"
    assert f"because a matrix is kept:\n{write_again}" in done.stdout
    assert "pages/matrix" not in done.stdout
    assert "done         other lanes       none has its target\n" in done.stdout


# What is refused


@pytest.mark.parametrize(
    ("release", "item", "says"),
    [
        ("1.0", "probe", "BROKEN on made-target 1.0: return x + x + 1"),
        ("3.0", "probe", "that a target is not there does not say that it will not come back"),
    ],
)
def test_a_lock_on_which_the_probe_does_not_say_fixed_refuses(
    checkout: Checkout, release: str, item: str, says: str
) -> None:
    checkout.lane("pinned", release)
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--json", lane="pinned")

    items = checklist(done)
    assert (done.returncode, items[item][0], items["condition"][0]) == (1, "refused", "refused")
    assert says in items[item][1]
    assert items["reproducer"] == ("not reached", "not run")
    assert checkout.status == set()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "return Behaviour(",
            'return Behaviour(broken=True, seen="still wrong")\n    return Behaviour(',
            "FAILED: the probe says FIXED, the behaviour is broken: still wrong (case double)",
        ),
        (
            "if not hasattr",
            'raise Blocked("no such device")\n    if not hasattr',
            "no case that runs on this host, and no kept receipt of these versions, shows BUG_NOT_PRESENT for made_target.l",
        ),
        ('overlay="double-fix"', 'overlay="other-fix"', "99-double has no case of double-fix"),
    ],
    ids=["it shows the bug", "it cannot run", "it is about something else"],
)
def test_a_reproducer_that_does_not_show_the_bug_gone_refuses(
    checkout: Checkout, old: str, new: str, says: str
) -> None:
    path = checkout.root / "packs/99-double/reproduce.py"
    path.write_text(path.read_text().replace(old, new))
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--json")

    assert done.returncode == 1
    state, said = checklist(done)["reproducer"]
    assert state == "refused"
    assert says in said
    assert checkout.status == set()


def test_a_kept_receipt_counts_where_this_host_can_run_no_case(checkout: Checkout) -> None:
    path = checkout.root / "packs/99-double/reproduce.py"
    has_device = 'if __import__("os").environ.get("MADE_UP_DEVICE") is None:\n        raise Blocked("no device")\n'
    path.write_text(path.read_text().replace("    if not hasattr", f"    {has_device}    if not hasattr"))
    command = ("-m", "megacpp_overlays", "repro", "99", "--keep", "packs")
    kept = checkout.python(*command, interpreter=checkout.interpreter("fixed"), MADE_UP_DEVICE="1")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    state, said = checklist(done)["reproducer"]
    assert state == "done"
    assert "; 99-double/receipts/" in said
    assert said.endswith(".log shows BUG_NOT_PRESENT for made_target.layers")
    assert not [line for line in checkout.status if "receipts" in line]


def in_two_parts(checkout: Checkout) -> None:
    """Give the overlay a second part, and a case for each; that of the second can run where MADE_UP_DEVICE is set."""
    overlay = checkout.root / "overlays/double_fix.py"
    more = 'Target(distribution="made-target", module="made_target.more", symbol="double")'
    overlay.write_text(f"import dataclasses\n{overlay.read_text().replace('from __future__ import annotations', '')}")
    overlay.write_text(f"{overlay.read_text()}\nPARTS = (OVERLAY, dataclasses.replace(OVERLAY, target={more}))\n")
    reproducer = checkout.root / "packs/99-double/reproduce.py"
    head, _, _ = reproducer.read_text().partition("CASES")
    cases = """
        def measure_more():
            if __import__("os").environ.get("MADE_UP_DEVICE") is None:
                raise Blocked("no device")
            return measure()


        CASES = (
            Case(name="double", overlay="double-fix", device="cpu", versions=(), run=measure, targets=("made_target.layers",)),
            Case(name="more", overlay="double-fix", device="cpu", versions=(), run=measure_more, targets=("made_target.more",)),
        )
    """
    checkout.write({"packs/99-double/reproduce.py": head + textwrap.dedent(cases)})
    [layers] = (checkout.root / ".envs/fixed").glob("lib/*/site-packages/made_target/layers.py")
    shutil.copy(layers, layers.with_name("more.py"))
    for arguments in (["ledger", "--write", "RETIREMENT.md"], ["receipts", "--sync"]):
        done = checkout.run(*arguments)
        assert done.returncode == 0, done.stderr


def test_every_part_that_is_fixed_needs_a_case_that_shows_it(checkout: Checkout) -> None:
    in_two_parts(checkout)
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--json")

    assert done.returncode == 1
    state, said = checklist(done)["reproducer"]
    assert state == "refused"
    assert said.startswith("no case that runs on this host, and no kept receipt of these versions, shows ")
    assert "BUG_NOT_PRESENT for made_target.more: " in said
    assert "BLOCKED: no device (case more)" in said
    assert checkout.status == set()


def test_one_part_may_be_shown_here_and_the_other_by_a_kept_receipt(checkout: Checkout) -> None:
    in_two_parts(checkout)
    command = ("-m", "megacpp_overlays", "repro", "99", "--keep", "packs", "--case", "more")
    kept = checkout.python(*command, interpreter=checkout.interpreter("fixed"), MADE_UP_DEVICE="1")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    state, said = checklist(done)["reproducer"]
    assert state == "done"
    assert "BUG_NOT_PRESENT: double(1) = 2 (case double)" in said
    assert said.endswith(".log shows BUG_NOT_PRESENT for made_target.more")


def test_a_lane_that_needs_the_overlay_refuses_until_it_is_named(checkout: Checkout) -> None:
    checkout.lane("broken", "1.0")

    done = retire(checkout)

    assert done.returncode == 1
    assert "refused      lane broken       made-target 1.0: needs it; BROKEN: return x + x + 1\n" in done.stdout
    assert done.stdout.endswith("To let these lanes run unpatched: --leave broken\n")
    assert checkout.status == set()


def test_a_lane_with_the_name_of_the_lock_is_looked_at_where_it_is_another_file(
    checkout: Checkout, tmp_path: Path
) -> None:
    proven = checkout.lane("fixed", "2.0", environment=False).rename(tmp_path / "next.txt")
    checkout.lane("fixed", "1.0", environment=False)
    checkout.commit()
    python = checkout.interpreter("fixed")

    done = checkout.run("retire", ID, "--lock", str(proven), "--python", python, "--leave", "broken", "--json")

    assert done.returncode == 1
    state, said = checklist(done)["lane fixed"]
    assert state == "refused"
    assert said.startswith("made-target 1.0: nobody knows whether it needs it")
    assert checkout.status == set()


def test_the_lock_itself_is_no_other_lane_by_whatever_path_it_is_named(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(checkout.root / "locks/fixed.txt")

    done = checkout.run("retire", ID, "--lock", str(tmp_path / "link.txt"), "--leave", "broken", "--dry-run", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "lane fixed" not in checklist(done)


def test_a_lane_without_environment_is_known_only_by_the_same_files(checkout: Checkout) -> None:
    checkout.lane("same", "2.0", environment=False)
    checkout.lane("rebuilt", "2.0", environment=False, other="another build of the same version")
    checkout.write({"locks/unrelated.txt": f"# lane: unrelated\nother==1.0 --hash=sha256:{'0' * 64}\n"})
    checkout.write({"locks/wheels.txt": "no lane, and no lock either\n"})
    checkout.commit()

    items = checklist(retire(checkout, "--json", "--leave", "broken"))

    assert items["lane same"] == (
        "done",
        "made-target 2.0: needs it no more; it pins the same files as locks/fixed.txt",
    )
    assert items["lane rebuilt"][0] == "refused"
    assert "nobody knows whether it needs it; no environment holds this lock" in items["lane rebuilt"][1]
    assert "lane unrelated" not in items


def test_uncommitted_changes_in_the_way_refuse(checkout: Checkout) -> None:
    (checkout.root / "CHANGELOG.md").write_text("# Changelog\n\nmine\n")

    done = retire(checkout, "--json", "--leave", "broken")

    assert done.returncode == 1
    assert checklist(done)["working tree"] == ("refused", "M CHANGELOG.md")
    assert (checkout.root / "CHANGELOG.md").read_text() == "# Changelog\n\nmine\n"


def test_an_untracked_file_in_the_way_refuses_whatever_git_is_set_to_show(checkout: Checkout) -> None:
    checkout.git("config", "status.showUntrackedFiles", "no")
    (checkout.root / "tests/test_double_fix_mine.py").write_text("# mine\n")

    done = retire(checkout, "--json", "--leave", "broken")

    assert done.returncode == 1
    assert checklist(done)["working tree"] == ("refused", "?? tests/test_double_fix_mine.py")
    assert (checkout.root / "tests/test_double_fix_mine.py").read_text() == "# mine\n"


def test_what_else_lies_in_the_checkout_is_no_obstacle(checkout: Checkout, tmp_path: Path) -> None:
    made = Checkout(tmp_path / "module")
    made.write({"a.txt": "a\n"})
    made.git("init", "-q", "-b", "main")
    made.commit()
    checkout.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(made.root), "module")
    checkout.commit()
    shutil.copytree(made.root, checkout.root / "nested")  # a checkout within this one
    checkout.write({"half.py": "def half(:\n"})

    done = retire(checkout, "--leave", "broken")

    assert done.returncode == 0, done.stdout + done.stderr
    type_in(checkout, done.stdout.rstrip().splitlines()[-1].strip())
    assert checkout.status == {"?? half.py", "?? nested/"}
    assert (checkout.root / "module/a.txt").read_text() == "a\n"


def test_a_lock_without_environment_refuses_and_says_how_to_make_one(checkout: Checkout) -> None:
    checkout.lane("pinned", "2.0", environment=False)
    checkout.commit()

    items = checklist(retire(checkout, "--json", "--leave", "broken", lane="pinned"))

    assert items["environment"][0] == "refused"
    assert "`make .envs/pinned/.ready` makes one" in items["environment"][1]
    assert items["reproducer"][0] == "not reached"


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("CHANGELOG.md", "CHANGELOG.md cannot be read: No such file or directory"),
        (
            "packs/threads.json",
            "`megacpp-overlays receipts --sync` does not hold: 99: its state is retired, and made/up#7",
        ),
    ],
    ids=["nothing to write to", "a check that would not hold"],
)
def test_a_change_that_does_not_work_out_on_the_copy_is_not_made(checkout: Checkout, missing: str, says: str) -> None:
    (checkout.root / missing).unlink()
    manifest = checkout.root / "packs/manifest.json"
    manifest.write_text(manifest.read_text().replace('"checked": "2026-01-03"', '"checked": null'))
    assert checkout.run("receipts", "--sync").returncode == 0
    checkout.commit()

    done = retire(checkout, "--json", "--leave", "broken")

    assert done.returncode == 1
    state, said = checklist(done)["change"]
    assert state == "refused"
    assert says in said
    assert said.endswith("; nothing was changed")
    assert checkout.status == set()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["double-fxi", "--lock", "locks/fixed.txt"], 2, "there is no overlay double-fxi; did you mean double-fix?"),
        ([ID, "--lock", "locks/fixed.txt", "--leave", "brokn"], 2, "no such lane; did you mean broken? known: broken"),
        ([ID, "--lock", "locks/fixed.txt", "--since", "soon"], 2, "--since soon is no version"),
        (
            [ID, "--lock", "locks/fixed.txt", "--since", "2.1"],
            2,
            "--since 2.1 is newer than 2.0, which locks/fixed.txt",
        ),
        ([ID, "--lock", "locks/other.txt"], 1, "locks/other.txt: it does not pin made-target, so it shows nothing"),
        ([ID, "--lock", "locks/none.txt"], 1, "locks/none.txt: cannot read this lock"),
        ([ID], 2, "the following arguments are required: --lock"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(
    checkout: Checkout, arguments: list[str], code: int, says: str
) -> None:
    checkout.write({"locks/other.txt": f"# lane: other\nother==1.0 --hash=sha256:{'0' * 64}\n"})

    done = checkout.run("retire", *arguments)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in " ".join(done.stderr.split())


def test_a_package_that_is_in_no_checkout_has_nothing_to_prepare(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".git")

    done = retire(checkout)

    assert done.returncode == 1
    assert "is no git checkout, so there is nothing to prepare a commit in" in done.stderr


def test_the_overlay_of_a_plugin_is_retired_by_its_publisher(checkout: Checkout) -> None:
    text = (checkout.root / "overlays/double_fix.py").read_text()
    (checkout.root / "overlays/double_fix.py").unlink()
    metadata = "ours-1.0.dist-info"
    checkout.write(
        {
            "ours.py": text,
            f"{metadata}/METADATA": "Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n",
            f"{metadata}/entry_points.txt": "[megacpp_overlays.overlays]\nours = ours:OVERLAY\n",
        }
    )

    done = checkout.run("retire", ID, "--lock", "locks/fixed.txt", MEGACPP_OVERLAYS_PLUGINS="ours")

    assert done.returncode == 1
    assert "double-fix is declared in ours, which is no module of this checkout" in done.stderr


# What is saved while it runs

SAVES = """
    import os
    from pathlib import Path

    with Path(os.environ["MADE_UP_SAVE"]).open("a") as file:
        file.write("# mine\\n")
"""


def save_while_it_runs(checkout: Checkout) -> None:
    """Let the reproducer save a file, as a person may while it runs."""
    path = checkout.root / "packs/99-double/reproduce.py"
    path.write_text(path.read_text().replace("    from made_target import", f"{SAVES}\n    from made_target import"))
    checkout.commit()


@pytest.mark.parametrize("name", ["overlays/double_fix.py", "README.md"])
def test_a_file_in_the_way_that_is_saved_meanwhile_stays_as_it_was_saved(checkout: Checkout, name: str) -> None:
    save_while_it_runs(checkout)

    done = retire(checkout, "--leave", "broken", MADE_UP_SAVE=str(checkout.root / name))

    assert done.returncode == 1
    assert f"{name} was changed by somebody else meanwhile; nothing was done, try again" in done.stderr
    assert checkout.status == {f"M {name}"}
    assert (checkout.root / name).read_text().endswith("# mine\n")


@pytest.mark.parametrize("name", ["tests/test_all.py", "tests/test_double_fix_mine.py"])
def test_a_file_beside_it_that_is_saved_meanwhile_is_kept_and_not_committed(checkout: Checkout, name: str) -> None:
    save_while_it_runs(checkout)

    done = retire(checkout, "--leave", "broken", MADE_UP_SAVE=str(checkout.root / name))

    assert done.returncode == 0, done.stdout + done.stderr
    type_in(checkout, done.stdout.rstrip().splitlines()[-1].strip())
    assert [line[2:].strip() for line in checkout.status] == [name]
    assert (checkout.root / name).read_text().endswith("# mine\n")


# All or nothing

SIGNALLED = """
import os
import signal
import sys
from pathlib import Path

# Under `nohup` the tests ignore SIGHUP, and what they start would, too.
signal.signal(int(sys.argv[-1]), signal.SIG_DFL)

from megacpp_overlays.cli import main

replace = Path.replace


def replace_and_be_told_to_end(draft, path):
    done = replace(draft, path)
    if Path(path).is_relative_to(Path.cwd()):
        os.kill(os.getpid(), int(sys.argv.pop()))
    return done


Path.replace = replace_and_be_told_to_end
sys.exit(main(sys.argv[1:-1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_in_the_middle_puts_everything_back(checkout: Checkout, number: signal.Signals) -> None:
    arguments = ("retire", ID, "--lock", "locks/fixed.txt", "--leave", "broken")

    done = checkout.python("-c", SIGNALLED, *arguments, str(int(number)))

    assert done.returncode == 128 + number, done.stderr
    assert checkout.status == set()
    assert not list(checkout.root.rglob(".*.md.*"))


@pytest.fixture
def working(tmp_path: Path) -> tuple[Checkout, WorkingTree]:
    made = Checkout(tmp_path / "tree")
    made.write({"a.txt": "a\n", "b.txt": "b\n", "folder/c.txt": "c\n"})
    made.git("init", "-q", "-b", "main")
    made.commit()
    return made, WorkingTree(made.root)


CHANGES = (
    Change(path="a.txt", before=b"a\n", after=b"A\n"),
    Change(path="b.txt", before=b"b\n", after=None),
    Change(path="new/d.txt", before=None, after=b"d\n"),
    Change(path="folder/c.txt", before=b"c\n", after=None),
)


def test_changes_are_found_on_a_copy_and_taken_over(working: tuple[Checkout, WorkingTree], tmp_path: Path) -> None:
    made, working_tree = working
    copy = Checkout(tmp_path / "copy")
    taken = working_tree.copy(copy.root)
    copy.write({"a.txt": "A\n", "new/d.txt": "d\n", "__pycache__/a.pyc": ""})
    (copy.root / "b.txt").unlink()
    (copy.root / "folder/c.txt").unlink()

    changes = taken.changes()
    working_tree.take_over(changes)

    assert set(changes) == set(CHANGES)
    assert made.status == {"M a.txt", "D b.txt", "?? new/d.txt", "D folder/c.txt"}


def test_a_failure_in_the_middle_puts_everything_back(
    working: tuple[Checkout, WorkingTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, working_tree = working
    (made.root / "a.txt").chmod(0o755)
    made.commit()
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.name == "c.txt":
            raise OSError(28, "No space left on device", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)

    with pytest.raises(UpkeepError, match=r"c\.txt: No space left on device; everything is as it was"):
        working_tree.take_over(CHANGES)

    assert made.status == set()


def test_an_interrupt_in_the_middle_puts_everything_back(
    working: tuple[Checkout, WorkingTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, working_tree = working

    unlink = Path.unlink

    def interrupt(path: Path, missing_ok: bool = False) -> None:
        if path.name == "b.txt":
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupt)

    with pytest.raises(KeyboardInterrupt):
        working_tree.take_over(CHANGES[:2])

    assert made.status == set()


def test_a_file_that_somebody_changed_meanwhile_stops_it(working: tuple[Checkout, WorkingTree]) -> None:
    made, working_tree = working
    (made.root / "folder/c.txt").write_text("mine\n")

    with pytest.raises(UpkeepError, match=r"folder/c\.txt was changed by somebody else meanwhile"):
        working_tree.take_over(CHANGES)

    assert made.status == {"M folder/c.txt"}


def test_what_was_saved_since_the_copy_was_made_is_no_part_of_the_change(
    working: tuple[Checkout, WorkingTree], tmp_path: Path
) -> None:
    made, working_tree = working
    taken = working_tree.copy(tmp_path / "copy")
    (tmp_path / "copy/a.txt").write_text("A\n")
    made.write({"b.txt": "mine\n", "folder/mine.txt": "mine\n"})

    changes = taken.changes()
    working_tree.take_over(changes)

    assert changes == CHANGES[:1]
    assert made.status == {"M a.txt", "M b.txt", "?? folder/mine.txt"}


@pytest.mark.parametrize("name", ["a.txt", "new/d.txt"])
def test_what_was_saved_since_the_copy_was_made_is_not_overwritten(
    working: tuple[Checkout, WorkingTree], tmp_path: Path, name: str
) -> None:
    made, working_tree = working
    copy = Checkout(tmp_path / "copy")
    taken = working_tree.copy(copy.root)
    copy.write({"a.txt": "A\n", "new/d.txt": "d\n"})
    made.write({name: "mine\n"})

    with pytest.raises(UpkeepError, match=f"{name} was changed by somebody else meanwhile"):
        working_tree.take_over(taken.changes())

    assert (made.root / name).read_text() == "mine\n"
    assert [line[2:].strip() for line in made.status] == [name]


def test_what_is_saved_while_files_are_replaced_stays(
    working: tuple[Checkout, WorkingTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, working_tree = working
    replace = Path.replace

    def save_and_replace(draft: Path, path: Path) -> Path:
        made.write({"b.txt": "mine\n"})
        return replace(draft, path)

    monkeypatch.setattr(Path, "replace", save_and_replace)

    with pytest.raises(UpkeepError, match=r"b\.txt was changed by somebody else meanwhile"):
        working_tree.take_over(CHANGES)

    assert made.status == {"M b.txt"}


def test_links_and_ignored_files_are_handled_as_git_does(working: tuple[Checkout, WorkingTree], tmp_path: Path) -> None:
    made, working_tree = working
    made.write({".gitignore": "/big/\n", "big/file": "-"})
    (made.root / "link").symlink_to("folder")
    made.commit()
    taken = working_tree.copy(tmp_path / "copy")

    assert not (tmp_path / "copy" / "big").exists()
    assert (tmp_path / "copy" / "link").is_symlink()
    assert taken.changes() == ()


# For real


@pytest.mark.upstream
def test_liger_flce_none_backward_can_be_retired_with_the_newest_release(tmp_path: Path) -> None:
    newest = ROOT / ".envs/newest/bin/python"
    assert newest.exists(), f"there is no {newest}: run `make setup`"
    clone = Checkout(tmp_path / "clone")
    WorkingTree(ROOT).copy(clone.root)
    if "liger-flce-none-backward" in (clone.root / "megacpp_overlays/loader/retired.json").read_text():
        pytest.skip("it was")
    clone.git("init", "-q", "-b", "main")
    clone.commit()
    lanes = [path.stem for path in (clone.root / "locks").glob("*.txt") if "# lane: " in path.read_text()]
    leave = [word for lane in lanes for word in ("--leave", lane)]

    done = clone.run(
        *("retire", "liger-flce-none-backward", "--lock", "locks/newest.txt"),
        *("--environments", str(ROOT / ".envs"), "--since", "0.8.2", *leave),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "FIXED on liger-kernel 0.8.5" in done.stdout
    assert clone.run("ledger", "--check", "RETIREMENT.md").returncode == 0
    assert clone.run("receipts", "--check").returncode == 0
    audit = clone.python("-m", "megacpp_overlays", "audit", "--json", interpreter=str(newest))
    assert "liger-flce-none-backward" not in audit.stdout
    clone.commit()
    here = clone.python("-m", "megacpp_overlays", "repro", "9", "--case", "interpreter")  # liger-kernel 0.8.1
    assert here.returncode == 1
    assert "FAILED: the bug is back, or this release never had the repair" in here.stdout
