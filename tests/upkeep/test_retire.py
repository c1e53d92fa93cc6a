"""`megacpp-overlays retire`: an overlay gets its history entry when upstream is shown to be right, and nothing is touched otherwise.

The checkout is made up, and everything in it is real; see `made_up_checkout`.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from made_up_checkout import ID, UPSTREAM, VARIABLE, Checkout, copy_checkout, make
from places import ROOT

from megacpp_overlays.cli.codes import ExitCode


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
    """A copy of the checkout for one test."""
    shutil.copytree(template.root, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout")


def retire(
    checkout: Checkout, *arguments: str, lane: str = "fixed", **variables: str
) -> subprocess.CompletedProcess[str]:
    return checkout.run("retire", ID, "--lock", f"locks/{lane}.txt", *arguments, **variables)


def checklist(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return the items of a run with --json, each with its state and its text."""
    assert done.stdout, done.stderr
    return {item["item"]: (item["state"], item["said"]) for item in json.loads(done.stdout)["checklist"]}


# Written files, and the work that is left to a person

LEFT = """\
Remove:
  git rm overlays/double_fix.py feature_probes/double_fix.py tests/gpu/test_double_fix_on_gpu.py tests/test_double_fix.py

Remove as well, unless others use them, because nothing else names them:
  megacpp_overlays/kernels/doubling.py

Edit:
  packs/99-double/README.md: the pack becomes class `regression guard`, lifecycle state `retired`; `double-fix` retired \
DATE, made-target 2.0
  CHANGELOG.md: Overlay `double-fix` (pack 99): made-target 2.0 is right without it. Its reproducer stays as a \
regression guard. Unpatched from here on: `broken` (made-target 1.0).

Edit, because these lines name the removed overlay or its files:
  README.md:7: | `double-fix` | double adds one |
  README.md:12: `MEGACPP_OVERLAY_DOUBLE_FIX=off` switches it off.
  packs/99-double/README.md:7: | Overlay | `double-fix` |
  packs/99-double/README.md:10: `tests/test_double_fix.py`
  tests/test_all.py:1: IDS = {"double-fix"}

Bring in step:
  python scripts/list_overlays.py
  megacpp-overlays ledger --write RETIREMENT.md
  megacpp-overlays receipts --sync
  make matrix

Then run `make test`, and commit:
  git add -A && git commit -m 'Retire double-fix: made-target 2.0 is right without it' -m 'Shown on lane fixed: the \
probe says FIXED, the overlay'"'"'s own condition holds, and the reproducer of pack 99 says BUG_NOT_PRESENT. Its \
reproducer stays as a regression guard. Unpatched from here on: `broken` (made-target 1.0).'
"""


@pytest.fixture(scope="module")
def retirement(template: Checkout, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, str]:
    """A checkout in which the overlay was retired, and the command's output."""
    root = tmp_path_factory.mktemp("retirement") / "checkout"
    shutil.copytree(template.root, root, symlinks=True)
    done = retire(Checkout(root), "--leave", "broken")
    assert done.returncode == 0, done.stdout + done.stderr
    return Checkout(root), done.stdout


def test_the_history_entry_and_the_receipt_are_written_and_nothing_else(retirement: tuple[Checkout, str]) -> None:
    checkout, _ = retirement

    new = {line for line in checkout.status if line.startswith("??")}
    assert checkout.status - new == {"M megacpp_overlays/loader/retired.json", "M packs/manifest.json"}
    assert [line[: line.rindex("/")] for line in new] == ["?? packs/99-double/receipts"]
    [entry] = json.loads((checkout.root / "megacpp_overlays/loader/retired.json").read_text())
    assert (entry["id"], entry["pack"], entry["distribution"], entry["version"]) == (ID, 99, UPSTREAM, "2.0")
    assert entry["why"] == "every supported made-target doubles without adding one"
    assert [target["symbol"] for target in entry["targets"]] == ["double"]
    assert [thread["number"] for thread in entry["threads"]] == [7]


def test_the_steps_that_are_left_are_printed_in_their_order(retirement: tuple[Checkout, str]) -> None:
    _, _, left = retirement[1].partition("\n\nRemove:")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    assert f"Remove:{left}" == LEFT.replace("DATE", today)


@pytest.mark.full
def test_a_dry_run_prints_the_entry_and_the_steps_and_writes_nothing(checkout: Checkout) -> None:
    done = retire(checkout, "--leave", "broken", "--dry-run")

    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.status == set()
    assert '\n    "why": "every supported made-target doubles without adding one",\n' in done.stdout
    assert "\n  git rm overlays/double_fix.py feature_probes/double_fix.py " in done.stdout
    assert done.stdout.endswith("\nNothing was written. Without --dry-run it is.\n")


def follow(checkout: Checkout, said: str) -> None:
    """Take the printed steps as a person would, except the matrix and the tests."""
    [remove] = re.findall(r"^  (git rm .*)$", said, re.MULTILINE)
    checkout.git(*shlex.split(remove)[1:])
    [name] = re.findall(r"^  (packs/\S+): the pack becomes class ", said, re.MULTILINE)
    notes = checkout.root / name
    text = re.sub(r"^\| Class \|.*", "| Class | regression guard |", notes.read_text(), flags=re.MULTILINE)
    notes.write_text(re.sub(r"^\| Lifecycle state \|.*", "| Lifecycle state | retired |", text, flags=re.MULTILINE))
    for command in re.findall(r"^  megacpp-overlays (.*)$", said, re.MULTILINE):
        done = checkout.run(*shlex.split(command))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def retired(retirement: tuple[Checkout, str], tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The retirement with every printed step taken, except the commit."""
    root = tmp_path_factory.mktemp("retired") / "checkout"
    shutil.copytree(retirement[0].root, root, symlinks=True)
    follow(Checkout(root), retirement[1])
    return Checkout(root)


def test_ledger_and_receipts_are_in_step_after_the_steps(retired: Checkout) -> None:
    assert retired.run("ledger", "--check", "RETIREMENT.md").returncode == 0
    assert retired.run("receipts", "--check").returncode == 0
    assert "| `double-fix` | 99 |" in (retired.root / "RETIREMENT.md").read_text()
    assert "## double-fix" not in (retired.root / "RETIREMENT.md").read_text()


def test_the_pack_becomes_a_regression_guard_with_its_targets_and_threads(retired: Checkout) -> None:
    [pack] = json.loads((retired.root / "packs/manifest.json").read_text())["packs"]
    assert (pack["class"], pack["state"], pack["overlays"]) == ("regression guard", "retired", [])
    assert [target["symbol"] for target in pack["targets"]] == ["double"]
    assert [thread["number"] for thread in pack["threads"]] == [7]
    assert [claim["sentinel"] for claim in pack["receipts"][0]["claims"]] == ["BUG_NOT_PRESENT"]


def test_a_launcher_that_still_switches_it_off_starts_with_a_word(retired: Checkout) -> None:
    done = retired.python("-c", "import megacpp_overlays; print(megacpp_overlays.audit())", **{VARIABLE: "off"})

    assert done.returncode == 0
    assert f"{ID} was retired on " in done.stderr
    assert f"with made-target 2.0: {VARIABLE} does nothing and can go" in done.stderr
    assert ID not in done.stdout


def test_a_launcher_that_still_undoes_it_goes_on_with_a_word(retired: Checkout) -> None:
    done = retired.python("-c", f"import megacpp_overlays; megacpp_overlays.undo({ID!r}); print('trains')")

    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
    assert f"{ID} was retired on " in done.stderr


def test_a_second_retirement_says_when_the_first_was(retired: Checkout) -> None:
    done = retire(retired)

    assert done.returncode == ExitCode.NOT_CHECKED
    assert f"megacpp-overlays: {ID} was retired on " in done.stderr


@pytest.mark.full
def test_one_of_two_overlays_of_a_pack_leaves_the_files_of_the_other(checkout: Checkout) -> None:
    overlay = (checkout.root / "overlays/double_fix.py").read_text()
    other = overlay.replace('"double-fix"', '"double-fix-more"').replace(
        'symbol="double", make', 'symbol="other", make'
    )
    checkout.write({"overlays/double_fix_more.py": other, "tests/test_double_fix_more.py": ""})
    for arguments in (["ledger", "--write", "RETIREMENT.md"], ["receipts", "--sync"]):
        assert checkout.run(*arguments).returncode == 0
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--dry-run", "--json")

    data = json.loads(done.stdout)
    # The probe and the kernel have another user, and the test is the other overlay's.
    assert data["remove"] == [
        "overlays/double_fix.py",
        "tests/gpu/test_double_fix_on_gpu.py",
        "tests/test_double_fix.py",
    ]
    assert data["unused"] == []
    assert not [line for line in data["mentions"] if "double_fix_more" in line and "double-fix" in line]
    assert "regression guard`" not in retire(checkout, "--leave", "broken", "--dry-run").stdout


@pytest.mark.full
def test_runs_of_the_reproducer_are_named_where_the_pack_has_no_overlay_left(checkout: Checkout) -> None:
    checkout.write({"tests/test_lanes.py": 'done = run("repro", "99")\n'})
    checkout.commit()

    done = retire(checkout, "--leave", "broken", "--dry-run", "--json")

    assert 'tests/test_lanes.py:1: done = run("repro", "99")' in json.loads(done.stdout)["mentions"]


# Refusals


@pytest.mark.parametrize(
    ("release", "item", "says"),
    [
        ("1.0", "probe", "BROKEN on made-target 1.0: return x + x + 1"),
        pytest.param(
            "3.0", "probe", "that a target is not there does not say that it will not come back", marks=pytest.mark.full
        ),
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
        pytest.param(
            "if not hasattr",
            'raise Blocked("no such device")\n    if not hasattr',
            "no case that runs on this host, and no kept receipt of these versions, shows BUG_NOT_PRESENT for made_target.l",
            marks=pytest.mark.full,
        ),
        pytest.param(
            'overlay="double-fix"',
            'overlay="other-fix"',
            "99-double has no case of double-fix",
            marks=pytest.mark.full,
        ),
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_a_lane_that_needs_the_overlay_refuses_until_it_is_named(checkout: Checkout) -> None:
    checkout.lane("broken", "1.0")

    done = retire(checkout)

    assert done.returncode == 1
    assert "refused      lane broken       made-target 1.0: needs it; BROKEN: return x + x + 1\n" in done.stdout
    assert done.stdout.endswith("To let these lanes run unpatched: --leave broken\n")
    assert checkout.status == set()


@pytest.mark.full
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
    assert said.startswith("made-target 1.0: it is unknown whether it needs it")
    assert checkout.status == set()


@pytest.mark.full
def test_the_lock_itself_is_no_other_lane_under_any_path(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(checkout.root / "locks/fixed.txt")

    done = checkout.run("retire", ID, "--lock", str(tmp_path / "link.txt"), "--leave", "broken", "--dry-run", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "lane fixed" not in checklist(done)


@pytest.mark.full
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
    assert "it is unknown whether it needs it; no environment holds this lock" in items["lane rebuilt"][1]
    assert "lane unrelated" not in items


def test_a_lock_without_environment_refuses_and_says_how_to_make_one(checkout: Checkout) -> None:
    checkout.lane("pinned", "2.0", environment=False)
    checkout.commit()

    items = checklist(retire(checkout, "--json", "--leave", "broken", lane="pinned"))

    assert items["environment"][0] == "refused"
    assert "`make .envs/pinned/.ready` makes one" in items["environment"][1]
    assert items["reproducer"][0] == "not reached"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["double-fxi", "--lock", "locks/fixed.txt"], 2, "there is no overlay double-fxi; did you mean double-fix?"),
        pytest.param(
            [ID, "--lock", "locks/fixed.txt", "--leave", "brokn"],
            2,
            "no such lane; did you mean broken? known: broken",
            marks=pytest.mark.full,
        ),
        ([ID, "--lock", "locks/fixed.txt", "--since", "soon"], 2, "--since soon is no version"),
        pytest.param(
            [ID, "--lock", "locks/fixed.txt", "--since", "2.1"],
            2,
            "--since 2.1 is newer than 2.0, which locks/fixed.txt",
            marks=pytest.mark.full,
        ),
        (
            [ID, "--lock", "locks/other.txt"],
            ExitCode.NOT_CHECKED,
            "locks/other.txt: it does not pin made-target, so it shows nothing",
        ),
        pytest.param(
            [ID, "--lock", "locks/none.txt"],
            ExitCode.NOT_CHECKED,
            "locks/none.txt: cannot read this lock",
            marks=pytest.mark.full,
        ),
        pytest.param([ID], 2, "the following arguments are required: --lock", marks=pytest.mark.full),
    ],
)
def test_impossible_arguments_are_refused_with_the_possible_ones(
    checkout: Checkout, arguments: list[str], code: int, says: str
) -> None:
    checkout.write({"locks/other.txt": f"# lane: other\nother==1.0 --hash=sha256:{'0' * 64}\n"})

    done = checkout.run("retire", *arguments)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in " ".join(done.stderr.split())


def test_a_package_that_is_in_no_checkout_has_nothing_to_retire_from(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".git")

    done = retire(checkout)

    assert done.returncode == ExitCode.NOT_CHECKED
    assert "is no git checkout, so there is nothing to retire from" in done.stderr


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

    assert done.returncode == ExitCode.NOT_CHECKED
    assert "there is no overlays/double_fix.py in this checkout: the publisher of the plugin" in done.stderr


# For real


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.unmeasured_children
def test_liger_flce_none_backward_can_be_retired_with_the_newest_release(tmp_path: Path) -> None:
    newest = ROOT / ".envs/newest/bin/python"
    assert newest.exists(), f"there is no {newest}: run `make setup`"
    clone = Checkout(tmp_path / "clone")
    copy_checkout(ROOT, clone.root)
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
    follow(clone, done.stdout)
    assert clone.run("ledger", "--check", "RETIREMENT.md").returncode == 0
    assert clone.run("receipts", "--check").returncode == 0
    audit = clone.python("-m", "megacpp_overlays", "audit", "--json", interpreter=str(newest))
    assert "liger-flce-none-backward" not in audit.stdout
    clone.commit()
    current = str(ROOT / ".venv/bin/python")  # liger-kernel 0.8.1
    broken = clone.python("-m", "megacpp_overlays", "repro", "9", "--case", "interpreter", interpreter=current)
    assert broken.returncode == 1
    assert "FAILED: the bug is back, or this release never had the repair" in broken.stdout
