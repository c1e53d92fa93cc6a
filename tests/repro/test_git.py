"""Calls of git: neither the repository nor the shell can make them run another program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from repositories import commit_all, write_files

from megacpp_overlays.repro import git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write_files(tmp_path / "repository", {"layers.py": "x = 1\n"})
    commit_all(folder)
    return folder


def test_an_answer_is_the_output_of_git(repository: Path) -> None:
    assert git.run(repository, "ls-files", "-z") == "layers.py\0"
    assert git.ask(repository, "rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_a_failure_is_an_error_with_the_first_line_of_git(repository: Path) -> None:
    with pytest.raises(git.GitError, match=r"^git rev-parse: fatal: .*nonsense"):
        git.run(repository, "rev-parse", "nonsense", "--")
    assert git.ask(repository, "rev-parse", "--verify", "nonsense") is None


def test_without_git_the_error_says_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(git.GitError, match="git is not installed here"):
        git.run(repository, "status")


def test_variables_of_a_hook_do_not_choose_the_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))

    assert git.run(repository, "ls-files") == "layers.py\n"


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath"])
def test_programs_that_a_repository_names_are_not_run(repository: Path, tmp_path: Path, setting: str) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("post-index-change", "watch"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (folder / name).chmod(0o755)
    value = folder / "watch" if setting == "core.fsmonitor" else folder
    subprocess.run(["git", "-C", str(repository), "config", setting, str(value)], check=True)
    subprocess.run(["git", "-C", str(repository), "update-index", "--force-write-index"], check=True)
    assert ran.exists()  # git itself runs it
    ran.unlink()

    git.run(repository, "status", "--porcelain")
    git.run(repository, "update-index", "--force-write-index")

    assert not ran.exists()


@pytest.mark.parametrize(("protocol", "address"), [("file", "file://{here}"), ("ext", "ext::touch {here}/ran")])
def test_no_protocol_may_be_used_even_where_the_repository_allows_it(
    repository: Path, protocol: str, address: str
) -> None:
    subprocess.run(["git", "-C", str(repository), "config", f"protocol.{protocol}.allow", "always"], check=True)

    with pytest.raises(git.GitError, match=f"transport '{protocol}' not allowed"):
        git.run(repository, "fetch", address.format(here=repository))

    assert not (repository / "ran").exists()


@pytest.mark.parametrize("driver", ["clean", "process"])
@pytest.mark.parametrize("where", ["the work tree", "a submodule"])
def test_filters_that_a_repository_names_are_not_run(repository: Path, tmp_path: Path, driver: str, where: str) -> None:
    (tmp_path / "program").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    (tmp_path / "program").chmod(0o755)
    inner = repository
    if where == "a submodule":
        allowed = ("-c", "protocol.file.allow=always", "-C", str(repository))
        for words in (
            ["submodule", "--quiet", "add", str(repository), "inner"],
            ["config", "submodule.inner.ignore", "none"],
        ):
            subprocess.run(["git", *allowed, *words], check=True)
        inner = repository / "inner"
    for words in ((f"filter.a.{driver}", f"{tmp_path}/program"), ("filter.a.required", "true")):
        subprocess.run(["git", "-C", str(inner), "config", *words], check=True)
    (inner / ".gitattributes").write_text("* filter=a\n")
    (inner / "layers.py").write_text("x = 2\n")
    subprocess.run(["git", "-C", str(repository), "status"], capture_output=True, check=False)
    assert (tmp_path / "ran").exists()  # git itself runs it
    (tmp_path / "ran").unlink()

    said = git.run(repository, "status", "--porcelain", "--untracked-files=no")

    assert not (tmp_path / "ran").exists()
    if where == "the work tree":
        assert said == " M layers.py\n"


EVERY = [
    ("rev-parse", "--verify", "HEAD^{commit}"),
    ("rev-parse", "--show-toplevel"),
    ("log", "-1", "--format=%ct"),
    ("log", "-1", "--patch"),
    ("ls-tree", "-r", "-t", "-z", "--full-tree", "HEAD"),
    ("ls-files", "--stage", "-z"),
    ("ls-files", "--others", "-z"),
    ("cat-file", "blob", "HEAD:layers.py"),
    ("read-tree", "HEAD"),
    ("status", "--porcelain"),
    ("diff",),
    ("show", "HEAD"),
    ("update-index", "--force-write-index"),
]
"""Commands that this project runs in a repository, and further ones that it may come to run."""

HOSTILE = {
    "core.fsmonitor": (("{program}",), ("status",)),
    "core.hooksPath": (("{hooks}",), ("update-index", "--force-write-index")),
    "core.pager": (("{program}",), ("--paginate", "log", "-1")),
    "filter.evil.clean": (("{program}",), ("status",)),
    "filter.evil.process": (("{program}",), ("status",)),
    "diff.evil.textconv": (("{program}",), ("diff",)),
    "diff.evil.command": (("{program}",), ("diff",)),
    "diff.external": (("{program}",), ("diff",)),
    "gpg.program": (("{program}", "log.showSignature=true"), ("log", "-1")),
}
"""Configuration that names a program for git to run: the value, other settings that it needs, and a command that runs it."""


@pytest.fixture
def armed(repository: Path, tmp_path: Path) -> Path:
    """The repository with attributes, its one file changed, its commit with a false signature; a hostile program leaves the file `ran`."""
    program = tmp_path / "hooks" / "post-index-change"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
    commit = subprocess.run(
        ["git", "-C", str(repository), "cat-file", "commit", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    head, _, message = commit.partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n none\n -----END PGP SIGNATURE-----"
    words = ["git", "-C", str(repository), "hash-object", "-t", "commit", "-w", "--stdin"]
    made = subprocess.run(words, input=f"{head}\n{signature}\n\n{message}", capture_output=True, text=True, check=True)
    subprocess.run(["git", "-C", str(repository), "update-ref", "HEAD", made.stdout.strip()], check=True)
    (repository / "layers.py").write_text("x = 2\n")
    return repository


@pytest.mark.parametrize("level", ["the system", "the user", "the repository"])
@pytest.mark.parametrize("setting", HOSTILE)
def test_no_program_of_any_configuration_is_run(
    armed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, setting: str
) -> None:
    (value, *others), command = HOSTILE[setting]
    files = {"the system": tmp_path / "system", "the user": tmp_path / ".gitconfig"}
    file = files.get(level, armed / ".git" / "config")
    named = value.format(program=tmp_path / "hooks" / "post-index-change", hooks=tmp_path / "hooks")
    for each in (f"{setting}={named}", *others):
        subprocess.run(["git", "config", "--file", str(file), *each.split("=", 1)], check=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    variables = {"GIT_CONFIG_SYSTEM": str(tmp_path / "system"), "GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig")}
    ran = tmp_path / "ran"
    if setting != "core.pager":  # which needs a terminal
        env = {**os.environ, **variables}
        subprocess.run(["git", "-C", str(armed), *command], env=env, capture_output=True, check=False)
        assert ran.exists()  # git itself runs it
        ran.unlink()

    for words in EVERY:
        git.run(armed, *words, variables=variables)
        assert not ran.exists(), words


@pytest.mark.parametrize("level", ["the system", "the user", "the repository"])
def test_trust_in_a_repository_of_another_owner_is_for_the_user_and_the_system_to_give(
    repository: Path, tmp_path: Path, level: str
) -> None:
    files = {"the system": tmp_path / "system", "the user": tmp_path / ".gitconfig"}
    file = files.get(level, repository / ".git" / "config")
    variables = {"GIT_CONFIG_SYSTEM": str(tmp_path / "system"), "GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig")}
    variables["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = (
        "1"  # as in git's own tests: not every user may change the owner of a file
    )
    with pytest.raises(git.GitError, match="dubious ownership"):
        git.run(repository, "rev-parse", "HEAD", variables=variables)

    subprocess.run(["git", "config", "--file", str(file), "safe.directory", str(repository)], check=True)

    if level == "the repository":
        with pytest.raises(git.GitError, match="dubious ownership"):
            git.run(repository, "rev-parse", "HEAD", variables=variables)
    else:
        assert git.run(repository, "rev-parse", "HEAD", variables=variables)


@pytest.fixture
def forged(repository: Path, tmp_path: Path) -> Path:
    """A source tree whose authors put a repository at its top, file by file."""
    folder = tmp_path / "tree"
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "config", "core.bare", "false"], check=True)
    subprocess.run(["git", "-C", str(folder), "config", "core.worktree", str(folder)], check=True)
    (folder / "package").mkdir()
    return folder


@pytest.mark.parametrize("asked", [".", "package", "objects"])
def test_a_source_tree_with_the_files_of_a_repository_is_none(forged: Path, asked: str) -> None:
    with pytest.raises(git.GitError, match="has HEAD, objects, refs among other files, so it is no repository"):
        git.run(forged / asked, "rev-parse", "HEAD")


def test_in_a_clone_such_files_are_content(forged: Path, tmp_path: Path) -> None:
    """Committed files, at the top or further down, do not change the answers about the clone."""
    clone = tmp_path / "clone"
    (clone / "deeper").mkdir(parents=True)
    for place in (clone, clone / "deeper"):
        subprocess.run(["cp", "-r", f"{forged}/.", str(place)], check=True)
    subprocess.run(["git", "init", "-q", str(clone)], check=True)

    # the clone has no commit; the committed repository has one
    assert git.ask(clone, "rev-parse", "HEAD^{commit}") is None
    with pytest.raises(git.GitError, match="so it is no repository"):
        git.run(clone / "deeper", "rev-parse", "HEAD")


def test_a_bare_repository_is_one_where_it_is_named_itself(repository: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(tmp_path / "mirror")], check=True)

    for place in (tmp_path / "mirror", repository / ".git"):
        assert git.run(place, "ls-tree", "--name-only", "HEAD") == "layers.py\n"
