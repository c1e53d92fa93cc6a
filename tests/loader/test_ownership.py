"""The live object must be the one in the source, or nothing is installed."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from made_up import Upstream

from megacpp_overlays.loader import live_names, ownership, seams
from megacpp_overlays.source.trees import InstalledTree, ModuleSource


def owner_of(upstream: Upstream, module: ModuleType, symbol: str) -> str | None:
    source = InstalledTree().module(upstream.module_name)
    assert source is not None
    return ownership.foreign_owner(live_names.resolve(module, symbol), symbol, source)


def test_untouched_code_is_upstreams_own(upstream: Upstream) -> None:
    module = upstream.load()

    for symbol in ("double", "Layer.forward", "Layer.static", "Layer.build", "Layer.size"):
        assert owner_of(upstream, module, symbol) is None, symbol


def test_a_decorator_in_the_source_explains_one_wrapper(upstream: Upstream) -> None:
    upstream.write(
        """
        import functools

        def logged(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)
            return wrapper

        class Layer:
            @staticmethod
            @logged
            def forward(x):
                return x
        """
    )
    module = upstream.load()

    assert owner_of(upstream, module, "Layer.forward") is None

    module.Layer.forward = staticmethod(module.logged(module.Layer.forward))  # one wrapper more than the source has
    assert "was replaced by" in (owner_of(upstream, module, "Layer.forward") or "")


def test_a_replaced_function_names_its_new_owner(upstream: Upstream) -> None:
    module = upstream.load()

    def theirs(x: Any) -> Any:
        return x

    module.double = theirs

    assert "theirs (" in (owner_of(upstream, module, "double") or "")


def test_a_wrapper_that_claims_to_wrap_the_original_is_still_foreign(upstream: Upstream) -> None:
    module = upstream.load()
    original = module.double
    module.double = functools.wraps(original)(lambda x: original(x))

    assert "was replaced by" in (owner_of(upstream, module, "double") or "")


def test_a_built_in_in_place_of_a_function_is_foreign(upstream: Upstream) -> None:
    module = upstream.load()
    module.double = abs

    assert "builtins.abs" in (owner_of(upstream, module, "double") or "")


def test_a_method_that_the_source_does_not_have_is_foreign(upstream: Upstream) -> None:
    module = upstream.load()
    module.Layer.extra = lambda self: None

    assert "is not in" in (owner_of(upstream, module, "Layer.extra") or "")


def test_behind_our_own_seam_is_the_original(upstream: Upstream) -> None:
    module = upstream.load()
    seams.replace(module, "double", lambda original: lambda x: original(x), overlay_id="double-fix")

    assert owner_of(upstream, module, "double") is None


def test_a_file_that_changed_under_a_running_process_is_noticed(upstream: Upstream) -> None:
    module = upstream.load()
    upstream.write("\n\n\ndef double(x):\n    return x + x + 1\n")

    assert "was replaced by" in (owner_of(upstream, module, "double") or "")


def test_a_module_that_was_imported_through_a_link_is_upstreams_own(upstream: Upstream) -> None:
    module = upstream.load()
    source = InstalledTree().module(upstream.module_name)
    assert source is not None
    link = upstream.folder.parent / f"link_to_{upstream.name}"
    link.symlink_to(upstream.folder)
    through_link = ModuleSource(source.name, str(link / upstream.name / "layers.py"), source.text)

    assert ownership.foreign_owner(live_names.resolve(module, "double"), "double", through_link) is None


def test_a_function_of_another_file_on_the_same_line_has_another_owner(upstream: Upstream) -> None:
    upstream.write((upstream.folder / upstream.name / "layers.py").read_text(), module="copy")
    module, other = upstream.load(), upstream.load("copy")
    module.double = other.double

    assert "copy.py" in (owner_of(upstream, module, "double") or "")
