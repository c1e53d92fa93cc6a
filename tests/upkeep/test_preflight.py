"""`megacpp-overlays pack check`: the checks on the day when a pack is sent, and the message of each failure."""

from __future__ import annotations

import ast
import datetime
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_environments import install_here
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from made_up_packs import REPRODUCER, Packs, lines_of, notes, searched, thread, today
from places import HANG_S, ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.filing import approvals, formatters, preflight, rendering, rerun, standing, wording
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome
from megacpp_overlays.upkeep.filing.filing import digest
from megacpp_overlays.upkeep.filing.formatters import Formatter
from megacpp_overlays.upkeep.filing.rendering import Notes

pytestmark = pytest.mark.usefixtures("one_day")

PASSED, FAILED, NOT_APPLICABLE = CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.NOT_APPLICABLE


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packs:
    """A folder of packs whose overlay is an installed plugin, with a broken upstream."""
    return Packs(tmp_path / "packs", (install_here(tmp_path, monkeypatch, BROKEN_TEXT).overlay(),))


def approve(packs: Packs, number: int = 99) -> None:
    answers = iter([approvals.words_for(number), "A Person"])
    approvals.approve(packs.folder, packs.standing(number), lambda _: None, lambda _: next(answers))


def command(packs: Packs, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "megacpp_overlays", "pack", "check", "99", "--packs", str(packs.folder), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=HANG_S)


# The whole


def test_a_pack_that_passes_everything_may_be_sent_by_a_person_today(packs: Packs) -> None:
    packs.ready(kind="overlay", more=searched())
    approve(packs)

    done = command(packs)

    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [line.partition(": ")[0] for line in checks] == [
        "1. reproducer",
        "2. text",
        "3. attachment",
        "4. private words",
        "5. formatter",
        "6. approval",
        "7. to be sent",
        "8. upstream",
    ]
    assert f"passed: on {today()}, exit code 0: BUG_REPRODUCED (double), FIX_VALIDATED (double)" in done.stdout
    assert "\n     host: " in done.stdout
    assert "not applicable: no diff is attached" in done.stdout
    assert "pack 99 may be sent by a person, today: new issue in made/up" in done.stdout


def test_a_pack_without_a_reproducer_says_so_and_has_all_other_checks(
    packs: Packs, capsys: pytest.CaptureFixture[str]
) -> None:
    packs.write(kind="bug report", reproducer=None)
    packs.synchronise()
    check = ["pack", "check", "99", "--packs", str(packs.folder)]

    codes = [cli.main(check)]
    text = capsys.readouterr().out
    codes.append(cli.main([*check, "--json"]))
    data = json.loads(capsys.readouterr().out)

    assert codes == [1, 1]
    assert "1. reproducer: FAILED: there is no reproduce.py yet" in text
    assert "not to be sent: 5 of 8 failed: reproducer, attachment, approval, to be sent, upstream" in text
    assert (data["number"], data["how"]) == (99, None)
    assert {each["name"]: each["outcome"] for each in data["checks"]} == {
        "reproducer": "FAILED",
        "text": "passed",
        "attachment": "FAILED",
        "private words": "passed",
        "formatter": "not applicable",
        "approval": "FAILED",
        "to be sent": "FAILED",
        "upstream": "FAILED",
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["check", "12345"],
            ExitCode.NOT_CHECKED,
            "there is no pack 12345; `megacpp-overlays repro --list` lists the 1 that there are",
        ),
        (["check", "99", "--tree", "/nowhere/at/all"], 2, "--tree: there is no such folder"),
        (
            ["check", "99", "--private-words", "/nowhere/at/all"],
            ExitCode.NOT_CHECKED,
            "the list of private words cannot be read",
        ),
        (["check"], 2, "the following arguments are required: NN"),
        ([], 2, "the following arguments are required: what"),
    ],
)
def test_bad_input_is_named(
    packs: Packs, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    packs.write()
    packs.synchronise()
    folder = ["--packs", str(packs.folder)] if len(arguments) > 1 else []

    try:
        ended = cli.main(["pack", *arguments, *folder])
    except SystemExit as wrong:
        ended = int(str(wrong.code))

    assert ended == code
    assert says in capsys.readouterr().err


def test_a_tree_that_cannot_be_on_a_path_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a:b").mkdir()

    with pytest.raises(SystemExit, match="2"):
        cli.main(["pack", "check", "99", "--tree", str(tmp_path / "a:b")])

    assert "cannot be on the path of a process" in capsys.readouterr().err


# 1. The reproducer, today


def test_a_receipt_of_another_day_does_not_count(packs: Packs, tmp_path: Path) -> None:
    packs.ready(kind="overlay")
    Upstream("made_target", tmp_path).write(FIXED_TEXT)

    found = rerun.check(packs.standing().pack, "overlay", packs.overlays)

    assert packs.standing().kept == (1, 1)
    assert (found.outcome, found.reason) == (
        FAILED,
        "BUG_REPRODUCED and FIX_VALIDATED not shown here; BUG_NOT_PRESENT was",
    )


@pytest.mark.parametrize(
    ("text", "passes", "fails"),
    [
        (BROKEN_TEXT, ("overlay", "fork", "held", "bug report"), ("regression guard",)),
        pytest.param(
            FIXED_TEXT, ("regression guard",), ("overlay", "fork", "held", "bug report"), marks=pytest.mark.full
        ),
    ],
    ids=["broken", "fixed"],
)
def test_what_must_be_shown_depends_on_the_class(
    packs: Packs, tmp_path: Path, text: str, passes: tuple[str, ...], fails: tuple[str, ...]
) -> None:
    packs.write()
    Upstream("made_target", tmp_path).write(text)

    receipt = rerun._run(packs.standing().pack, packs.overlays, None, 60, lambda _: None)

    assert {kind for kind in (*passes, *fails) if rerun._wrong_with(receipt, rerun._WANTED[kind]) is None} == {*passes}


@pytest.mark.parametrize(
    ("shown", "passes"),
    [
        ([("BUG_REPRODUCED", "one"), ("MEMORY_SAVE_VERIFIED", "one"), ("BUG_NOT_PRESENT", "two")], True),
        ([("BUG_REPRODUCED", "one"), ("FIX_VALIDATED", "two")], False),
        ([("BUG_REPRODUCED", "one")], False),
        ([], False),
    ],
)
def test_the_defect_and_its_repair_must_be_of_the_same_overlay(shown: list[tuple[str, str]], passes: bool) -> None:
    claims = [{"case": "x", "sentinel": sentinel, "overlay": overlay} for sentinel, overlay in shown]
    receipt = {"exit_code": 0, "tree": None, "claims": claims}

    assert (rerun._wrong_with(receipt, rerun._WANTED["overlay"]) is None) == passes


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("cpu", "cuda"), "nothing ran: every case is BLOCKED on this host"),
        (("value != 2", "value == 2"), "exit code 1: a case failed"),
        pytest.param(
            ("CASES =", "OTHER ="), "it cannot run: 99-double/reproduce.py declares no CASES", marks=pytest.mark.full
        ),
    ],
)
def test_a_run_that_shows_nothing_or_fails_does_not_pass(packs: Packs, edit: tuple[str, str], says: str) -> None:
    packs.write(reproducer=REPRODUCER.replace(*edit))

    found = rerun.check(packs.standing().pack, "overlay", packs.overlays)

    assert found.outcome is FAILED
    assert found.reason.startswith(says)


def test_a_case_that_takes_too_long_does_not_pass(packs: Packs) -> None:
    packs.write(reproducer=REPRODUCER.replace("    value", "    __import__('time').sleep(60)\n    value"))

    found = rerun.check(packs.standing().pack, "overlay", packs.overlays, timeout=1.5)

    assert (found.outcome, found.reason) == (FAILED, "exit code 1: a case failed")


def test_cases_run_on_a_given_tree_and_a_stand_in_never_passes(packs: Packs, tmp_path: Path) -> None:
    packs.write()
    real, stand_in = tmp_path / "tree", tmp_path / "other"
    for tree in (real, stand_in):
        tree.mkdir()
        Upstream("made_target", tree).write(BROKEN_TEXT)
    (stand_in / "STAND_IN").write_text("made-spring\n")
    pack = packs.standing().pack

    found = rerun.check(pack, "overlay", packs.overlays, tree=real)
    other = rerun.check(pack, "overlay", packs.overlays, tree=stand_in)

    assert found.outcome is PASSED, found
    assert "tree: made_target" in found.details[0]
    assert (other.outcome, other.reason) == (FAILED, "the tree is a stand-in and says nothing of upstream")


# 2. and 3. The text


def flaws(text: str, *, attached: tuple[str, ...] = ("reproduce.py",), elsewhere: tuple[int, ...] = ()) -> str:
    return lines_of([f"{flaw.line}: {flaw.text}" for flaw in Notes(text).flaws(attached=attached, elsewhere=elsewhere)])


def test_good_notes_have_no_flaw() -> None:
    assert flaws(notes()) == ""


@pytest.mark.parametrize("number", [1, 3, 9, 10, 12, 16])
def test_notes_of_this_repository_render(number: int) -> None:
    (path,) = (ROOT / "packs").glob(f"{number:02}-*/README.md")

    found = [flaw.text for flaw in Notes(path.read_text()).flaws(attached=("reproduce.py",), elsewhere=())]

    assert found == []


BAD_TEXT = {
    "fence left open": ("```\nopen", "this code fence is never closed"),
    "fence closed by a shorter one": ("````\nopen\n```", "this code fence is never closed"),
    "fence of one line": ("```", "this code fence is never closed"),
    "row too long": ("| a | b |\n|---|---|\n| 1 | 2 | 3 |", "this row has 3 cells and the table 2 columns"),
    "row too short": ("| a | b |\n|---|---|\n| 1 |", "this row has 1 cells and the table 2 columns"),
    "bar in code": ("| a | b |\n|---|---|\n| `x|y` | 2 |", "this row has 3 cells and the table 2 columns"),
    "no table": ("| a | b |\n|---|\n| 1 | 2 |", "this is no table"),
    "level left out": ("## More\n\n#### Deep", "a heading of level 4 follows level 2"),
    "second title": ("# Again", "there is a second title"),
    "type read as HTML": ("a List<int> of it", "<int> is read as HTML and vanishes"),
    "block of HTML": ("<div>\nx\n</div>", "<div> is read as HTML and vanishes"),
    "comment": ("<!-- todo -->", "is HTML that nobody sees"),
    "relative link": ("[log](receipts/a.log)", "receipts/a.log is relative, and no file that is attached"),
    "link out of the pack": ("[m](../manifest.json)", "../manifest.json is relative"),
    "picture": ("![plot](plot.png)", "plot.png is relative"),
    "no anchor": ("[up](#nowhere)", "#nowhere leads to no heading"),
    "empty link": ("[up]()", "an empty link leads to no heading"),
    "mail": ("[x](mailto:a@example.org)", "mailto:a@example.org is no address on the web"),
    "file on a disk": ("[x](file:///etc/x)", "[x](file:///etc/x) is a link without an address"),
    "undefined link": ("see [this][nothing]", "[this][nothing] is a link without an address"),
    "mention": ("use @torch for it", "@torch sends a message to somebody"),
    "thread of elsewhere": ("fixed by #77", "#77 is of another repository: write owner/name#77"),
}


@pytest.mark.parametrize("what", BAD_TEXT)
def test_text_that_would_render_wrong_is_named_with_its_line(what: str) -> None:
    text, says = BAD_TEXT[what]
    before = notes()

    found = flaws(f"{before}\n{text}\n", elsewhere=(77,))

    line = before.count("\n") + 2
    assert says in found
    assert int(found.partition(":")[0]) in range(line, line + 3)


GOOD_TEXT = {
    "fence in a quote": "> ```\n> x\n> ```",
    "longer closing fence": "```\n@x <y> #77\n`````",
    "table with escaped bar": "| a | b |\n|:--|--:|\n| `x\\|y` | |",
    "table without outer bars": "a | b\n--|--\n1 | 2",
    "harmless tags": "<details><summary>more</summary>\n\nx<br>y\n\n</details>",
    "link to the attachment": "[it](./reproduce.py)",
    "link on the web": "[it](https://example.org/a#b)",
    "link to a heading": "[it](#changed-surfaces)",
    "names in code": "`@torch`, `List<int>`, `#77`",
    "thread with its repository": "other/one#77, and mail to a@example.org",
}


@pytest.mark.parametrize("what", GOOD_TEXT)
def test_text_that_renders_right_is_no_flaw(what: str) -> None:
    assert flaws(f"{notes()}\n{GOOD_TEXT[what]}\n", elsewhere=(77,)) == ""


@pytest.mark.parametrize("section", rendering.SECTIONS)
def test_every_section_must_be_there_and_say_something(section: str) -> None:
    text = notes()
    renamed = text.replace(f"## {section}\n", "## Other\n")
    head, _, tail = text.partition(f"## {section}\n")
    emptied = f"{head}## {section}\n\n" + ("## " + tail.partition("\n## ")[2] if "\n## " in tail else "")

    assert f"there is no section {section}" in flaws(renamed)
    assert f"section {section} is empty" in flaws(emptied)


@given(text=st.text(alphabet="#`|-<>[]()@ab1 \n", max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(flaws(text), str)


def test_a_long_block_of_the_reproducer_must_be_attached_not_pasted() -> None:
    reproducer = "".join(f"line_{number} = {number}\n" for number in range(60))
    short, long = (textwrap.indent("".join(reproducer.splitlines(True)[:count]), "    ") for count in (20, 21))
    other = "line_1 = 1\n" + "".join(f"other_{number} = 1\n" for number in range(40))

    assert Notes(f"# x\n\n{short}\n").pasted(reproducer) == []
    assert Notes(f"# x\n\n```python\n{other}```\n").pasted(reproducer) == []
    (flaw,) = Notes(f"# x\n\n{long}\n").pasted(reproducer)
    assert (flaw.line, flaw.text) == (3, "21 lines of the reproducer are pasted here: attach the file")


# 4. Private words


def words_in(tmp_path: Path, text: str, words: wording.Words | None = None) -> list[str]:
    path = tmp_path / "text"
    path.write_text(text)
    return [str(spot) for spot in wording.search([("README.md", path)], words or wording.Words())]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("built in /data/training/run", "/data/training/run (path of a machine)"),
        ("in /home/somebody/x", "/home/somebody/x (home of a user)"),
        ("in /root", "/root (home of a user)"),
        (r"in C:\Users\somebody", r"C:\Users\somebody (home of a user)"),
        ("from 10.1.2.3", "10.1.2.3 (private address)"),
        ("from 192.168.0.7:8080", "192.168.0.7 (private address)"),
        ("from fd12:3456::1", "fd12:3456::1 (private address)"),
        ("from fe80::1 on", "fe80::1 (private address)"),
        ("on node7.cluster.internal", "node7.cluster.internal (internal host)"),
        ("on box.lan, again", "box.lan (internal host)"),
        ("ask some.body@company.com", "some.body@company.com (e-mail address)"),
        ("ghp_" + "a" * 36, "**** (a key or password)"),
        ("AKIA" + "A" * 16, "**** (a key or password)"),
        ("hf_" + "a" * 34, "**** (a key or password)"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "**** (a key or password)"),
        ("password = 'correcthorse'", "**** (a key or password)"),
        ('WANDB_API_KEY = "0123456789abcdef"', "**** (a key or password)"),
        ("export WANDB_API_KEY=0123456789abcdef0123", "**** (a key or password)"),
        ('HF_TOKEN="abcdefgh"', "**** (a key or password)"),
        ("DB_PASSWORD='correcthorse'", "**** (a key or password)"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "**** (a key or password)"),
        ("Authorization: Bearer abcdef0123456789", "**** (a key or password)"),
    ],
)
def test_text_that_is_private_on_any_machine_is_found_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    assert words_in(tmp_path, f"first\n{text}\n") == [f"README.md:2: {says}"]


@pytest.mark.parametrize(
    "text",
    [
        "megatron/core/ops, and/or, BF16/FP8/FP4",
        "https://github.com/NVIDIA/Megatron-LM/pull/1",
        "#!/usr/bin/env python, /dev/null, /proc/cpuinfo",
        "127.0.0.1, 0.0.0.0, ::1, 192.0.2.7, 2001:db8::7, 8.8.8.8, cuDNN 9.10.2.21",
        "x[1::2], a[::2], 10:20:30, std::vector",
        "class State(threading.local): pass; threading.local(); torch.internal.x",
        "git@github.com:a/b, x@example.org, 1+someone@users.noreply.github.com",
        "token: str, secret_name = x, max_tokens=100",
    ],
)
def test_public_text_is_not_found(tmp_path: Path, text: str) -> None:
    assert words_in(tmp_path, text) == []


def private_list(tmp_path: Path, *lines: str) -> wording.Words:
    path = tmp_path / "private-words.txt"
    path.write_text("\n".join(lines))
    return wording.read_list(path)


def test_a_private_phrase_is_found_over_the_end_of_a_line(tmp_path: Path) -> None:
    found = words_in(tmp_path, "seen on zebra\n  cluster, twice", private_list(tmp_path, "zebra cluster"))

    assert found == ["README.md:1: **** (private: line 1 of the list)"]


def test_a_private_name_of_a_file_is_found_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "nightjar-h200.diff"
    path.write_text("nothing\n")

    found = wording.search([("nightjar-h200.diff", path)], private_list(tmp_path, "nightjar"))

    assert list(map(str, found)) == ["****.diff:1: in its name: **** (private: line 1 of the list)"]


def test_a_private_list_finds_words_and_expressions_and_gives_neither_away(tmp_path: Path) -> None:
    words = private_list(tmp_path, "# names", "Bluebird", "", r"/run-\d{4}/", "c++")

    found = words_in(tmp_path, "bluebird sang\nin RUN-1234 of C++\nbluebirds, run-12\n", words)

    assert found == [
        "README.md:1: **** (private: line 2 of the list)",
        "README.md:2: **** (private: line 4 of the list)",
        "README.md:2: **** (private: line 5 of the list)",
    ]


def test_text_that_a_list_hides_is_not_shown_by_another_finding_either(tmp_path: Path) -> None:
    found = words_in(tmp_path, "at /data/bluebird/x", private_list(tmp_path, "bluebird"))

    assert found == ["README.md:1: **** (private: line 1 of the list)"]


def test_a_list_can_allow_a_built_in_finding(tmp_path: Path) -> None:
    words = private_list(tmp_path, "! 10.0.1.6", "!Box.lan")

    assert words_in(tmp_path, "TensorRT 10.0.1.6 on box.lan, 10.0.1.7", words) == [
        "README.md:1: 10.0.1.7 (private address)"
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [("/(secret/", r"private-words\.txt:2 is no regular expression"), ("/x*/", "2 is found everywhere")],
)
def test_a_bad_line_of_a_list_is_named_and_not_shown(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UpkeepError, match=says) as error:
        private_list(tmp_path, "good", line)

    assert "secret" not in str(error.value)


def test_notes_reproducer_attachments_and_receipts_are_all_looked_through(packs: Packs) -> None:
    folder = packs.ready()
    (folder / "README.md").write_text((folder / "README.md").read_text() + "at 10.1.1.1\n")
    (folder / "reproduce.py").write_text(REPRODUCER + "# at 10.1.1.2\n")
    (folder / "0001.diff").write_text("at 10.1.1.3\n")
    (log,) = (folder / "receipts").iterdir()
    log.write_text("at 10.1.1.4\n")

    found = preflight._private(packs.standing(), None)

    assert found.outcome is FAILED
    assert [detail.partition(":")[0] for detail in found.details] == [
        "README.md",
        "0001.diff",
        "reproduce.py",
        f"receipts/{log.name}",
    ]


def test_the_list_beside_the_packs_is_taken_and_another_one_can_be_given(
    packs: Packs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs.write(reproducer=None)
    packs.synchronise()
    (packs.folder / "private-words.txt").write_text("bluebird\nto find\n")
    (tmp_path / "mine").write_text("doubles\n")
    check = ["pack", "check", "99", "--packs", str(packs.folder)]

    assert cli.main(check) == cli.main([*check, "--private-words", str(tmp_path / "mine")]) == 1

    text = capsys.readouterr().out
    assert "passed: none in 1 files; built-in patterns, and a list of 2" in text
    assert "README.md:1: **** (private: line 1 of the list)" in text


# 5. The formatter of the target

RUFF = {"made/up": (Formatter("ruff>=0.5", ("ruff", "format", "--check", "--diff")),), "no/ne": ()}
DIFF = """\
--- a/pkg/layers.py
+++ b/pkg/layers.py
@@ -1,2 +1,2 @@
 def double(x):
-    return x + x + 1
+    return {new}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of the target with a setting of its formatter."""
    root = tmp_path / "checkout"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "layers.py").write_text("def double(x):\n    return x + x + 1\n")
    (root / "pyproject.toml").write_text('[tool.ruff.format]\nquote-style = "single"\n')
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture
def ruff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the ruff of this project on the path, for lanes that have none."""
    monkeypatch.setenv("PATH", str(ROOT / ".venv/bin"), prepend=os.pathsep)


def diff(tmp_path: Path, new: str) -> Path:
    path = tmp_path / "0001.diff"
    path.write_text(DIFF.format(new=new))
    return path


@pytest.mark.usefixtures("ruff")
@pytest.mark.parametrize(
    ("new", "outcome", "says"),
    [
        ("x + x", PASSED, "on pkg/layers.py"),
        ("x+x", FAILED, "ruff format --check --diff ended with 1"),
        ("'one' + x", PASSED, "on pkg/layers.py"),
        ('"one" + x', FAILED, "ruff format --check --diff ended with 1"),
    ],
)
def test_a_diff_is_formatted_as_the_settings_of_the_target_say(
    tmp_path: Path, checkout: Path, new: str, outcome: CheckOutcome, says: str
) -> None:
    before = (checkout / "pkg" / "layers.py").read_text()

    found = formatters.check([diff(tmp_path, new)], "made/up", checkout / "pkg", RUFF)

    assert (found.outcome, says in found.reason) == (outcome, True), found
    assert bool(found.details) == (outcome is FAILED)
    assert (checkout / "pkg" / "layers.py").read_text() == before


def test_files_that_the_target_does_not_format_are_left_alone(tmp_path: Path, checkout: Path) -> None:
    native = {"made/up": (Formatter("clang-format", ("clang-format",), r".*\.cc"),)}

    found = formatters.check([diff(tmp_path, "x+x")], "made/up", checkout, native)

    assert (found.outcome, found.reason) == (NOT_APPLICABLE, "the target formats none of pkg/layers.py")


@pytest.mark.usefixtures("ruff")
@pytest.mark.parametrize(
    ("repository", "formatter", "outcome", "says"),
    [
        ("un/known", RUFF, FAILED, "what un/known asks for is not known"),
        (None, RUFF, FAILED, "what None asks for is not known"),
        ("no/ne", RUFF, NOT_APPLICABLE, "no/ne asks for none"),
        (
            "made/up",
            {"made/up": (Formatter("nowhere==1", ("nowhere-to-be-found",)),)},
            FAILED,
            "pip install 'nowhere==1'",
        ),
        ("made/up", {"made/up": (Formatter("ruff<0.1", ("ruff",)),)}, FAILED, "and the target runs ruff<0.1"),
    ],
)
def test_a_formatter_that_cannot_run_is_named(
    tmp_path: Path,
    checkout: Path,
    repository: str | None,
    formatter: dict[str, tuple[Formatter, ...]],
    outcome: CheckOutcome,
    says: str,
) -> None:
    found = formatters.check([diff(tmp_path, "x")], repository, checkout, formatter)

    assert found.outcome is outcome
    assert says in found.reason


def test_a_diff_needs_a_tree_that_it_applies_to(tmp_path: Path, checkout: Path) -> None:
    without = formatters.check([diff(tmp_path, "x")], "made/up", None, RUFF)
    (checkout / "pkg" / "layers.py").write_text("something else\n")
    other = formatters.check([diff(tmp_path, "x")], "made/up", checkout, RUFF)

    assert without.reason == "--tree PATH, a checkout of made/up, is needed to apply the diff to"
    assert (other.outcome, other.reason) == (FAILED, "the diff does not apply to the tree")
    assert "0001.diff: error: patch failed: pkg/layers.py:1" in other.details


def test_a_diff_cannot_read_or_write_outside_of_the_tree(tmp_path: Path, checkout: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("x = 1\n")
    (checkout / "link.py").symlink_to(outside)
    for name in ("../outside.py", "link.py"):
        path = tmp_path / "0001.diff"
        path.write_text(f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-x = 1\n+x  =  2\n")

        found = formatters.check([path], "made/up", checkout, RUFF)

        assert (found.outcome, found.reason) == (FAILED, "the diff does not apply to the tree"), name
    assert outside.read_text() == "x = 1\n"


def test_every_target_of_the_inventory_is_in_the_table_of_formatters(packs: Packs) -> None:
    known = formatters.FORMATTERS

    assert {"NVIDIA/Megatron-LM", "linkedin/Liger-Kernel", "tile-ai/tilelang", "NVIDIA/TransformerEngine"} <= set(known)
    assert [formatter.command[0] for formatter in known["NVIDIA/Megatron-LM"]] == ["black", "isort", "pylint", "ruff"]


# 6. The approval, 7. the decision to send, 8. upstream


def one_check(packs: Packs, name: str) -> Check:
    status = packs.standing()
    makers: dict[str, Callable[[], Check]] = {
        "approval": lambda: approvals.check(packs.folder, status),
        "to be sent": lambda: preflight._meant_to_be_sent(status),
        "upstream": lambda: preflight.looked_at(status, today(), 14),
    }
    return makers[name]()


def test_an_approval_is_of_this_content_and_for_this_place(packs: Packs) -> None:
    folder = packs.ready(upstream="overlap", more=thread(1) + thread(2))
    packs.answer(1)
    packs.answer(2, "merged")
    assert one_check(packs, "approval").reason == "nobody approved it: megacpp-overlays pack approve 99"
    approve(packs)
    given = digest(packs.standing())

    assert one_check(packs, "approval").outcome is PASSED
    for name in ("README.md", "pack.toml", "0001.patch"):
        old = (folder / name).read_text() if (folder / name).exists() else None
        (folder / name).write_text((old or "") + "\n")
        changed = one_check(packs, "approval")
        assert changed.outcome is FAILED
        assert changed.reason.startswith(f"approved on {today()}, but for other content: megacpp-overlays pack approve")
        (folder / name).write_text(old) if old is not None else (folder / name).unlink()
    assert digest(packs.standing()) == given
    packs.answer(2, "open")
    assert one_check(packs, "approval").outcome is FAILED


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"upstream": "fixed"}, "fixed upstream: it is not filed, and becomes a regression guard"),
        ({"upstream": "declined"}, "declined upstream: it is not filed"),
        ({"priority": "none"}, "its priority is none: it is not filed"),
        ({"kind": "held"}, "it is held: not filed until its class is another one"),
        ({"kind": "regression guard"}, "it is a regression guard: nothing to file"),
        ({"kind": "bug report", "state": "filed"}, "its state is filed: it was sent"),
    ],
)
def test_a_settled_pack_is_never_sent(packs: Packs, facts: dict[str, str], says: str) -> None:
    packs.write(**facts)  # type: ignore[arg-type]

    found = one_check(packs, "to be sent")

    assert (found.outcome, found.reason) == (FAILED, says)
    assert one_check(packs, "approval").reason == f"nothing to approve: {says}"


def test_a_pack_that_is_not_ready_names_its_missing_parts(packs: Packs) -> None:
    packs.write(more=thread(1))

    found = one_check(packs, "to be sent")

    assert (found.outcome, found.reason) == (FAILED, "its state is draft, not ready")
    assert found.details == (
        "a kept receipt with BUG_REPRODUCED (megacpp-overlays repro 99 --keep packs)",
        "a look at 1 of its 1 threads (megacpp-overlays sweep)",
        "a person who moves its lifecycle state from draft to ready in its README.md",
    )


def test_ready_counts_only_where_receipts_show_it(packs: Packs) -> None:
    packs.write(state="ready", kind="bug report")

    found = one_check(packs, "to be sent")

    assert found.reason == "its claims do not hold"
    assert found.details == (
        "a claim that holds: its state is ready, and no receipt shows BUG_REPRODUCED for double-fix",
    )


def test_an_overlap_is_sent_as_a_comment_on_an_open_thread(packs: Packs) -> None:
    packs.ready(upstream="overlap", more=thread(1, state="closed") + thread(2) + thread(3, "other/one"))
    packs.answer(1, "open")
    packs.answer(2, "closed")
    packs.answer(3, "open", "other/one")

    assert one_check(packs, "to be sent").reason == "comment on made/up#1, and open no competing one"

    packs.answer(1, "merged")
    found = one_check(packs, "to be sent")
    assert found.outcome is FAILED
    assert "overlap, and none of its threads there is open" in found.reason


def test_a_diff_that_is_attached_goes_in_as_a_pull_request(packs: Packs) -> None:
    (packs.ready() / "0001.diff").write_text("")

    assert one_check(packs, "to be sent").reason == "new pull request in made/up"


@pytest.mark.parametrize(
    ("age", "state", "outcome"),
    [(0, "open", PASSED), (14, "open", PASSED), (15, "open", FAILED), (15, "merged", FAILED)],
)
def test_every_thread_that_can_change_must_have_a_recent_look(
    packs: Packs, age: int, state: str, outcome: CheckOutcome
) -> None:
    packs.ready(more=thread(1))
    packs.answer(1, state, age=age)

    found = one_check(packs, "upstream")

    assert found.outcome is outcome
    assert found.details == (f"made/up#1: {state}, looked at on {today() - datetime.timedelta(days=age)}",)


def test_a_thread_without_a_look_fails(packs: Packs) -> None:
    packs.write(more=thread(1))

    found = one_check(packs, "upstream")

    assert found.reason == "1 threads were not looked at within 14 days: megacpp-overlays sweep"
    assert found.details == ("made/up#1: unknown, looked at on no day",)


@pytest.mark.parametrize(
    ("age", "outcome", "says"),
    [
        (0, PASSED, "no thread is linked; searched on {day}"),
        (14, PASSED, "no thread is linked; searched on {day}"),
        (15, FAILED, "{day}, more than 14 days ago: search made/up"),
        (None, FAILED, "no search is written down: search made/up, then set searched in pack.toml"),
    ],
)
def test_without_a_thread_the_search_must_be_written_down(
    packs: Packs, age: int | None, outcome: CheckOutcome, says: str
) -> None:
    packs.write(more="" if age is None else searched(age))

    found = one_check(packs, "upstream")

    assert found.outcome is outcome
    assert says.format(day=today() - datetime.timedelta(days=age or 0)) in found.reason


# pack list


def test_the_list_says_where_every_pack_stands_and_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = Packs(tmp_path)
    packs.ready(91, more=thread(1) + thread(2))
    packs.answer(1, "merged")
    packs.answer(2)
    packs.write(92, kind="regression guard", reproducer=None)
    (packs.write(93, kind="held") / "pack.toml").unlink()
    packs.write(94, kind="bug report", state="reproduced", more=thread(9, state="not merged"))
    (packs.write(95, kind="fork", reproducer=None) / "pack.toml").unlink()
    packs.synchronise()
    packs.write(96)

    assert cli.main(["pack", "list", "--packs", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "91    bug report        ready       made/up     new       crash     1, 1 now       1 merged, 1 open" in text
    assert "next: megacpp-overlays pack check 91" in text
    assert "next: needs a reproduce.py that shows BUG_NOT_PRESENT; there is nothing to file" in text
    assert "next: it is held: not filed until its class is another one" in text
    assert "next: needs a kept receipt with BUG_REPRODUCED (megacpp-overlays repro 94 --keep packs)" in text
    assert "next: needs a pack.toml, with its repository, upstream and priority" in text
    assert "1 unknown" in text
    assert cli.main(["pack", "list", "--packs", str(tmp_path), "--json"]) == 0
    data = {each["number"]: each for each in json.loads(capsys.readouterr().out)}
    assert data[91]["threads"] == [
        {"thread": "made/up#1", "state": "merged", "checked": str(today())},
        {"thread": "made/up#2", "state": "open", "checked": str(today())},
    ]
    assert data[91]["receipts"] == {"kept": 1, "current": 1}
    assert data[95]["repository"] is None
    lacks = standing.of_one(tmp_path, 96, packs.overlays).lacks  # `packs.standing` would bring the manifest in step
    assert "a manifest in step (megacpp-overlays receipts --sync)" in lacks


def test_a_fixed_pack_with_an_overlay_is_sent_to_triage(packs: Packs) -> None:
    packs.write(upstream="fixed")

    assert packs.standing().next_step.endswith("becomes a regression guard (megacpp-overlays triage says when)")


def test_every_pack_of_this_repository_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pack", "list", "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    assert len(data) == len([path for path in (ROOT / "packs").iterdir() if path.name[:2].isdigit()])
    assert all(each["next_step"] for each in data)


# Nothing is ever sent

NETWORK = {"aiohttp", "asyncio", "ftplib", "http", "httpx", "pypi_simple", "requests", "smtplib", "socket", "ssl"}


def imports() -> Iterator[str]:
    base = ROOT / "megacpp_overlays"
    for path in (
        *(base / "upkeep" / "filing").glob("*.py"),
        base / "cli" / "pack.py",
        base / "cli" / "wave.py",
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert name not in {"__import__", "import_module"}, path


def test_no_module_of_this_part_imports_anything_that_could_post() -> None:
    found = set(imports())

    assert not {name for name in found if name.partition(".")[0] in NETWORK}
    assert {name for name in found if name.startswith("urllib")} == {"urllib.parse.unquote", "urllib.parse.urlsplit"}
    assert not {name for name in found if "github" in name}


def test_no_command_of_this_part_opens_a_connection(packs: Packs, tmp_path: Path) -> None:
    packs.ready(kind="overlay", more=searched())
    approve(packs)
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def watch(event, arguments):\n"
        "    if event in {'socket.connect', 'socket.sendto', 'socket.getaddrinfo', 'urllib.Request', 'http.client.connect'}:\n"
        "        os.write(2, event.encode())\n"
        "        os._exit(99)\n"
        "sys.addaudithook(watch)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(watch), os.environ["PYTHONPATH"]])}
    where = ["--packs", str(packs.folder)]
    commands = [["pack", "check", "99", *where], ["pack", "list", *where], ["wave", "plan", *where]]
    ways = [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        f"from megacpp_overlays import cli; sys.exit(max(map(cli.main, {commands!r})))",
    ]

    codes = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; {way}"], env=env, capture_output=True, check=False
        ).returncode
        for way in ways
    ]

    assert codes == [99, 0]
