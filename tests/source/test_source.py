"""Source trees: the same text from an interpreter, a wheel and a folder, and nothing is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from made_up import Upstream

from megacpp_overlays.errors import SourceError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.source.definitions import plain_function
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
from megacpp_overlays.source.trees import CachedTree, InstalledTree, ModuleSource, ParsedOnce, parameters


def source(text: str) -> ModuleSource:
    return ModuleSource("made_up", "made_up.py", text)


def test_nothing_is_imported_to_read_a_module_below_a_watched_package(
    upstream: Upstream, session: Callable[..., Session]
) -> None:
    """As `gated_delta_net` and `gated_delta_net.gdn` are: wrapt's finder would import the parents of the former."""
    inner = upstream.folder / upstream.name / "inner"
    inner.mkdir()
    (inner / "__init__.py").touch()
    (inner / "deep.py").touch()
    upstream.write("raise SystemExit('imported')", module="__init__")
    target = upstream.overlay().target._replace(module=f"{upstream.name}.inner")
    session(upstream.overlay(target=target)).arm()

    assert InstalledTree().module(f"{upstream.name}.inner.deep") is not None
    assert upstream.name not in sys.modules


def test_one_module_reads_the_same_from_every_kind_of_tree(upstream: Upstream, tmp_path: Path) -> None:
    archive = tmp_path / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.write(tmp_path / upstream.name / "layers.py", f"{upstream.name}/layers.py")
    packed = ArchiveTree(archive)

    found = [tree.module(upstream.module_name) for tree in (InstalledTree(), DirectoryTree(tmp_path), packed)]
    packed.close()

    assert all(found)
    assert len({each.sha256 for each in found if each}) == 1


def test_nothing_is_imported_to_read_a_module(upstream: Upstream) -> None:
    upstream.write("raise SystemExit('imported')", module="__init__")

    assert InstalledTree().module(upstream.module_name) is not None
    assert upstream.name not in sys.modules


def test_a_package_answers_with_its_init_file(upstream: Upstream, tmp_path: Path) -> None:
    for tree in (InstalledTree(), DirectoryTree(tmp_path)):
        found = tree.module(upstream.name)
        assert found is not None
        assert found.path.endswith("__init__.py")


@pytest.mark.parametrize("name", ["no_such_top", "{top}.no_such_module", "{top}.layers.deeper"])
def test_a_module_that_is_not_there_is_none(upstream: Upstream, tmp_path: Path, name: str) -> None:
    wanted = name.format(top=upstream.name)

    assert InstalledTree().module(wanted) is None
    assert DirectoryTree(tmp_path).module(wanted) is None


def test_a_loaded_module_answers_with_the_file_it_was_loaded_from(upstream: Upstream, tmp_path: Path) -> None:
    module = upstream.load()
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("def other(): ...\n")
    module.__file__ = str(elsewhere)

    found = InstalledTree().module(upstream.module_name)

    assert found is not None
    assert found.function("other") is not None


def test_a_namespace_package_is_searched_in_all_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, inner in (("one", "core"), ("two", "training")):
        package = tmp_path / folder / "spread_namespace" / inner
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"WHERE = {inner!r}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)

    found = [InstalledTree().module(f"spread_namespace.{inner}") for inner in ("core", "training")]

    assert [each and each.text for each in found] == ["WHERE = 'core'\n", "WHERE = 'training'\n"]


def test_a_compiled_module_has_no_source_and_says_so() -> None:
    import _json  # a C extension of the standard library, sometimes built in

    if not getattr(_json, "__file__", None):
        pytest.skip("this interpreter has _json built in")
    with pytest.raises(SourceError, match="no Python source"):
        InstalledTree().module("_json")


def test_text_that_cannot_be_decoded_or_parsed_is_an_error_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "garbled.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    with pytest.raises(SourceError, match=r"garbled\.py: cannot be decoded"):
        DirectoryTree(tmp_path).module("garbled")

    with pytest.raises(SourceError, match=r"made_up\.py:2: cannot be parsed"):
        _ = source("x = 1\nclass:\n").syntax


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    module = tmp_path / "layers.py"
    module.touch()
    sys.modules["vanished_module"] = type(sys)("vanished_module")
    sys.modules["vanished_module"].__file__ = str(tmp_path / "gone.py")
    try:
        with pytest.raises(SourceError, match="cannot read"):
            InstalledTree().module("vanished_module")
    finally:
        del sys.modules["vanished_module"]


def test_definitions_are_found_by_qualified_name_also_under_if_try_and_with() -> None:
    text = """
if FLAG:
    def under_if(): ...
else:
    def under_else(): ...
try:
    class Tried:
        async def method(self): ...
except ImportError:
    def under_except(): ...
with context():
    def under_with(): ...
"""
    for name in ("under_if", "under_else", "Tried.method", "under_except", "under_with"):
        assert source(text).function(name) is not None, name
    assert source(text).function("Tried") is None
    assert source(text).find("Tried") is not None
    assert source(text).find("Tried.missing") is None


def test_a_name_that_is_defined_twice_is_refused_because_text_cannot_say_which_is_live() -> None:
    text = "try:\n    def f(): ...\nexcept ImportError:\n    def f(): ...\n"

    with pytest.raises(SourceError, match="f is defined 2 times"):
        source(text).function("f")


def test_parameters_keep_their_order_and_kind() -> None:
    function = source("def f(a, /, b, *rest, c=1, **more): ...").function("f")

    assert function is not None
    assert parameters(function) == ("a", "b", "*rest", "c", "**more")


def test_a_remembered_tree_reads_each_module_once(upstream: Upstream) -> None:
    tree = CachedTree(InstalledTree())
    first = tree.module(upstream.module_name)
    upstream.write("changed = True\n")

    assert tree.module(upstream.module_name) is first
    assert tree.module("no_such_module") is None


def test_a_text_is_parsed_once_and_a_file_is_read_each_time(upstream: Upstream) -> None:
    tree = ParsedOnce(InstalledTree())
    first = tree.module(upstream.module_name)
    assert first is not None
    assert tree.module(upstream.module_name) is first

    upstream.write("changed = True\n")
    second = tree.module(upstream.module_name)

    assert second is not None
    assert second.text == "changed = True\n"
    assert tree.module(upstream.module_name) is second
    assert tree.module("no_such_module") is None


def test_the_last_few_parsed_texts_are_kept_until_they_are_forgotten(upstream: Upstream) -> None:
    names = [f"module_{number}" for number in range(ParsedOnce.KEPT + 1)]
    for name in names:
        upstream.write("x = 1\n", module=name)
    tree = ParsedOnce(InstalledTree())
    parsed = {name: tree.module(f"{upstream.name}.{name}") for name in names}

    assert tree.module(f"{upstream.name}.{names[-1]}") is parsed[names[-1]]
    assert tree.module(f"{upstream.name}.{names[0]}") is not parsed[names[0]]
    tree.forget()
    assert tree.module(f"{upstream.name}.{names[-1]}") is not parsed[names[-1]]


def test_a_file_of_a_folder_that_cannot_be_read_is_an_error_and_not_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot read it: File name too long"):
        DirectoryTree(tmp_path).module("x" * 300)


def test_a_launcher_loads_no_tree_but_the_one_it_needs() -> None:
    code = "import sys, megacpp_overlays; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    loaded = done.stdout.split()
    assert "megacpp_overlays.source.trees" in loaded
    assert not {"megacpp_overlays.source.file_trees", "tarfile"} & set(loaded)


def test_a_folder_is_named_by_its_path_or_as_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "layers.py").write_text("x = 1\n")

    found = [tree.module("layers") for tree in (DirectoryTree(tmp_path), DirectoryTree(tmp_path, prefix=""))]

    assert [each and each.path for each in found] == [str(tmp_path / "src" / "layers.py"), "src/layers.py"]


def test_a_module_without_a_spec_hides_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("stubbed_package")
    stub.__spec__ = None
    monkeypatch.setitem(sys.modules, "stubbed_package", stub)

    assert InstalledTree().module("stubbed_package.layers") is None


def test_a_module_that_a_wheel_does_not_have_is_none(tmp_path: Path) -> None:
    archive = tmp_path / "empty-1.0-py3-none-any.whl"
    zipfile.ZipFile(archive, "w").close()
    packed = ArchiveTree(archive)

    assert packed.module("empty.layers") is None
    packed.close()


def unreadable(folder: Path, name: str, how: str) -> str:
    """Write an unreadable module into a folder and return the expected error."""
    path = folder / f"{name}.py"
    if how == "codec":
        path.write_text("# coding: no-such-codec\n")
    elif how == "no codec of text":
        path.write_text("# coding: rot13\n")
    elif how == "bytes":
        path.write_bytes(b"x = '\xff'\n")
    elif how == "loop":
        path.symlink_to(path)
    elif how == "dangling":
        path.symlink_to(folder / "gone.py")
    elif how == "package in a loop":
        (folder / name).symlink_to(folder / name)
    elif how == "package that leads nowhere":
        (folder / name).symlink_to(folder / "gone")
    return "cannot be decoded" if how in {"codec", "no codec of text", "bytes"} else "cannot read"


UNREADABLE = [
    "codec",
    "no codec of text",
    "bytes",
    "loop",
    "dangling",
    "package in a loop",
    "package that leads nowhere",
]


@pytest.mark.parametrize("how", UNREADABLE)
def test_an_unreadable_module_is_an_error_and_not_absent(upstream: Upstream, how: str) -> None:
    said = unreadable(upstream.folder / upstream.name, "odd", how)

    for tree in (InstalledTree(), DirectoryTree(upstream.folder)):
        with pytest.raises(SourceError, match=said):
            tree.module(f"{upstream.name}.odd")


@pytest.mark.parametrize("how", ["package in a loop", "package that leads nowhere"])
def test_below_a_package_that_cannot_be_read_nothing_is_absent(upstream: Upstream, how: str) -> None:
    unreadable(upstream.folder / upstream.name, "odd", how)

    for tree in (InstalledTree(), DirectoryTree(upstream.folder)):
        with pytest.raises(SourceError, match="cannot read"):
            tree.module(f"{upstream.name}.odd.layers")


@pytest.mark.parametrize("suffix", [".so", ".pyc"])
def test_a_module_that_is_only_there_compiled_is_an_error_and_not_absent(upstream: Upstream, suffix: str) -> None:
    (upstream.folder / upstream.name / f"odd{suffix}").touch()

    with pytest.raises(SourceError, match="no Python source"):
        InstalledTree().module(f"{upstream.name}.odd")


def test_a_module_that_only_a_finder_knows_is_found(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As editable installs have them, and archives on the path."""
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("def double(x): ...\n")

    class Editable:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name == f"{upstream.name}.moved":
                return importlib.util.spec_from_file_location(name, elsewhere)
            return importlib.machinery.ModuleSpec(name, object()) if name == f"{upstream.name}.made" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])

    found = InstalledTree().module(f"{upstream.name}.moved")
    assert found is not None
    assert found.function("double") is not None
    with pytest.raises(SourceError, match="names no Python source"):
        InstalledTree().module(f"{upstream.name}.made")


@pytest.mark.parametrize(
    "gives",
    [
        "from elsewhere import *",
        "from elsewhere import double",
        "from elsewhere import other as double",
        "double = other",
        "def __getattr__(name): ...",
        "globals()['double'] = other",
        "globals().update(table)",
        "exec(text)",
        "import sys; sys.modules[__name__] = other",
    ],
)
def test_a_name_that_a_module_only_hands_on_is_not_missing(gives: str) -> None:
    module = source(f"{gives}\n")

    for ask in (module.find, module.function, lambda name: plain_function(module, name)):
        with pytest.raises(SourceError, match="double"):
            ask("double")


def test_a_name_that_nothing_gives_is_missing() -> None:
    module = source("import double_trouble\nfrom elsewhere import other\n\nclass Layer:\n    def forward(self): ...\n")

    assert module.find("double") is None
    assert plain_function(module, "double") is None
    assert plain_function(module, "Layer.backward") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n" * 100_000, "more than the 524,288 that a probe reads"),
        ("if x == 0: pass\n" + "".join(f"elif x == {n}: pass\n" for n in range(10_000)), "nested too deeply"),
        ("x = " + "-" * 60_000 + "1\n", "nested too deeply|cannot be parsed"),
        ("x = 1\n" * 40_000, "has 200,000 words and signs, more than the 131,072 that a probe reads"),
        ("x=(" + "1," * 70_000 + ")\n", "words and signs, more than the 131,072"),
        ("x = 1\0\n", "cannot be parsed"),
    ],
    ids=["long", "branches", "signs", "words", "signs without spaces", "null byte"],
)
def test_text_that_would_take_too_long_or_too_deep_is_an_error(text: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        _ = source(text).syntax


def test_definitions_are_where_probes_of_plugins_look_for_them() -> None:
    from megacpp_overlays.feature_probes import definitions as old
    from megacpp_overlays.source import definitions as new

    assert {name: vars(old).get(name) for name in vars(new) if not name.startswith("_")} == {
        name: each for name, each in vars(new).items() if not name.startswith("_")
    }
