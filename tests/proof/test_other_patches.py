"""Patches of other libraries: snapshots of names, the findings that depend on a function, and the page."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megacpp_overlays.source import DirectoryTree

UPSTREAM = """
class Router:
    def route(self, tokens):
        return self.bias(tokens)

    def bias(self, tokens):
        return tokens

    @staticmethod
    def width():
        return 4

def clip(values):
    return values

scale = None
"""
FOREIGN = "foreign.patches"


@pytest.fixture
def upstream() -> Iterator[Any]:
    """A loaded module of an upstream."""
    module = ModuleType("upstream.layers")
    sys.modules[module.__name__] = module
    exec(compile(UPSTREAM, "layers.py", "exec"), vars(module))
    yield module
    del sys.modules[module.__name__]


def written(text: str, **names: Any) -> Any:
    """Return the function that a text of the other library defines as `new`."""
    namespace = {"__name__": FOREIGN, "functools": functools, **names}
    exec(compile(text, "foreign/patches.py", "exec"), namespace)
    return namespace["new"]


def changes_of(upstream: Any, change: Any) -> list[Any]:
    import replaced_names

    before = replaced_names.take(["upstream"])
    change(upstream)
    return replaced_names.replaced(before, replaced_names.take(["upstream"]), "foreign")


def test_an_untouched_module_has_no_replaced_name(upstream: Any) -> None:
    assert changes_of(upstream, lambda _: None) == []


def test_a_replaced_method_is_named_by_its_code(upstream: Any) -> None:
    new = written("def new(self, tokens):\n    return 0\n")

    (found,) = changes_of(upstream, lambda module: setattr(module.Router, "route", new))

    assert (found.module, found.symbol) == ("upstream.layers", "Router.route")
    assert found.was == "upstream.layers.Router.route"
    assert found.now == "foreign.patches.new"
    assert found.place == "foreign/patches.py:1"
    assert not found.calls_original


def test_a_function_of_the_same_text_is_another_function(upstream: Any) -> None:
    new = written("def new(values):\n    return values\n")

    assert [each.symbol for each in changes_of(upstream, lambda module: setattr(module, "clip", new))] == ["clip"]


def test_a_static_method_around_the_same_function_is_no_change(upstream: Any) -> None:
    cls = upstream.Router

    assert changes_of(upstream, lambda _: setattr(cls, "width", staticmethod(cls.width))) == []


@pytest.mark.parametrize(
    "text",
    [
        "def make(old):\n    def wrapper(values):\n        return old(values)\n    return wrapper\nnew = make(old)\n",
        "@functools.wraps(old)\ndef new(values):\n    return 0\n",
        "def new(values, old=old):\n    return old(values)\n",
        "def new(values):\n    return old(values)\n",
        "new = functools.partial(old)\n",
    ],
    ids=["closure", "functools.wraps", "default", "global", "partial"],
)
def test_a_wrapper_holds_the_original(upstream: Any, text: str) -> None:
    new = written(text, old=upstream.clip)

    (found,) = changes_of(upstream, lambda module: setattr(module, "clip", new))

    assert found.calls_original
    assert found.was == "upstream.layers.clip"


def test_a_wrapper_with_the_name_of_its_target_is_named_by_its_code(upstream: Any) -> None:
    new = written("@functools.wraps(old)\ndef new(values):\n    return 0\n", old=upstream.clip)

    (found,) = changes_of(upstream, lambda module: setattr(module, "clip", new))

    assert new.__module__ == "upstream.layers"
    assert found.now.startswith("foreign.patches.")


def test_a_name_that_was_none_is_replaced_by_a_function(upstream: Any) -> None:
    new = written("def new(values):\n    return values\n")

    (found,) = changes_of(upstream, lambda module: setattr(module, "scale", new))

    assert (found.symbol, found.was, found.calls_original) == ("scale", "None", False)


def test_an_import_of_a_replaced_function_leads_to_its_definition(upstream: Any) -> None:
    user = ModuleType("upstream.user")
    user.clip = upstream.clip  # type: ignore[attr-defined]
    sys.modules[user.__name__] = user
    try:
        (found,) = changes_of(upstream, lambda _: setattr(user, "clip", written("def new(values):\n    return 0\n")))
    finally:
        del sys.modules[user.__name__]

    assert (found.module, found.symbol) == ("upstream.user", "clip")
    assert found.defined == ("upstream.layers", "clip")


def test_a_module_that_was_loaded_in_between_counts_where_the_other_library_changed_it(upstream: Any) -> None:
    late = ModuleType("upstream.late")

    def load(_: Any) -> None:
        exec(compile(UPSTREAM, "late.py", "exec"), vars(late))
        late.Router.bias = written("def new(self, tokens):\n    return 0\n")  # type: ignore[attr-defined]
        sys.modules[late.__name__] = late

    try:
        (found,) = changes_of(upstream, load)
    finally:
        del sys.modules[late.__name__]

    assert (found.module, found.symbol, found.was) == ("upstream.late", "Router.bias", "None")


def test_subclasses_of_the_other_library_and_their_methods_are_listed(upstream: Any) -> None:
    import replaced_names

    new = written("class new(Router):\n    def bias(self, tokens):\n        return 0\n", Router=upstream.Router)

    (found,) = replaced_names.overriding(["upstream"], "foreign")

    assert found == ("foreign.patches.new", "upstream.layers.Router", ("bias",))
    assert issubclass(new, upstream.Router)


def test_subclasses_of_an_abstract_class_are_listed(upstream: Any) -> None:
    import abc

    import replaced_names

    upstream.Router = abc.ABCMeta("Router", (upstream.Router,), {"__module__": "upstream.layers"})
    new = written("class new(Router):\n    def bias(self, tokens):\n        return 0\n", Router=upstream.Router)

    assert [each.name for each in replaced_names.overriding(["upstream"], "foreign")] == ["foreign.patches.new"]
    assert type(new) is abc.ABCMeta


SOURCE = '''\
"""Layers."""


class Router:
    def route(self, tokens):
        """Route."""
        if tokens:
            return self.bias(tokens)
        return None

    def bias(self, tokens): return tokens


def clip(values):
    return values
'''


@pytest.mark.parametrize(
    ("symbol", "gone", "left"),
    [
        ("Router.route", "self.bias", "def bias(self, tokens): return tokens"),
        ("Router.bias", "return tokens", "return self.bias(tokens)"),
        ("Router", "tokens)", "return values"),
        ("clip", "return values", "return self.bias(tokens)"),
    ],
)
def test_the_body_of_one_definition_is_removed(tmp_path: Path, symbol: str, gone: str, left: str) -> None:
    import read_bodies

    (tmp_path / "layers.py").write_text(SOURCE)
    source = DirectoryTree(tmp_path).module("layers")
    assert source is not None

    changed = read_bodies.without_body(source, symbol)

    compile(changed, "layers.py", "exec")
    assert read_bodies.BODY in changed
    assert changed.count(left) == SOURCE.count(left)
    assert changed.count(gone) < SOURCE.count(gone)


def test_a_name_that_is_not_defined_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    import read_bodies

    (tmp_path / "layers.py").write_text(SOURCE)
    source = DirectoryTree(tmp_path).module("layers")
    assert source is not None

    assert read_bodies.without_body(source, "Router.nothing") == SOURCE


NAME = {
    "module": "megatron.core.router",
    "symbol": "Router.route",
    "was": "megatron.core.router.Router.route",
    "now": "foreign.patches.<locals>.new",
    "place": "foreign/patches.py:1",
    "calls_original": False,
    "step": "patch()",
    "orders": ["before", "after"],
    "matters_to": [["bias", "megatron.core.router"]],
}


def decision(word: str, reason: str) -> dict[str, Any]:
    return {"id": "bias", "module": "megatron.core.router", "stock": "active", "decision": word, "reason": reason}


def library(before: list[Any], after: list[Any]) -> dict[str, Any]:
    return {"replaced": [NAME], "replaced_elsewhere": {}, "derived": [], "before": before, "after": after}


def test_a_replacement_that_matters_and_is_not_named_is_a_defect() -> None:
    import other_patches

    named = decision("conflict", "Router.route was replaced by new (foreign/patches.py:1)")
    other = decision("conflict", "ValueError: 3 dimensions")

    assert other_patches.unnoticed("foreign", library([named], [named])) == []
    assert len(other_patches.unnoticed("foreign", library([], [named]))) == 1
    assert len(other_patches.unnoticed("foreign", library([other], []))) == 2


def test_the_page_names_patches_that_the_audit_misses() -> None:
    import other_patches_page

    named = decision("conflict", "Router.route was replaced by foreign.patches.<locals>.new")
    page = other_patches_page.markdown({"versions": {"foreign": "1.0"}, "libraries": {"foreign": library([named], [])}})

    (row,) = (line for line in page.splitlines() if line.startswith("| `router` `Router.route`"))
    assert row.endswith("| no | `bias` | conflict | as without, **not named** |")
    assert "<locals>" not in page
