"""A symbol leads to the attribute that callers reach, and nothing of a third-party object is run on the way."""

from __future__ import annotations

import re
from typing import Any

import pytest
import wrapt
from made_up import Upstream

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader import live_names, seams
from megacpp_overlays.loader.live_names import NOTHING, follow, resolve


class Untouchable:
    """A third-party object in the place of a module."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_an_attribute_is_read_when_it_is_asked_for(upstream: Upstream) -> None:
    module = upstream.load()
    live = resolve(module, "double")

    module.double = abs

    assert live.raw is live.own is live.function is abs


def test_an_inherited_method_is_stored_in_its_base(upstream: Upstream) -> None:
    module = upstream.load()
    live = resolve(module, "Child.forward")

    assert live.owner is module.Child
    assert live.inherited
    assert live.own is None
    assert live.raw is vars(module.Layer)["forward"]


def test_behind_a_seam_is_the_original(upstream: Upstream) -> None:
    module = upstream.load()
    original = vars(module.Layer)["static"]
    live = resolve(module, "Layer.static")
    seam = seams.replace(*live, lambda function: lambda x: function(x), overlay_id="double-fix")

    assert str(live) == str(seam) == f"{upstream.module_name}.Layer.static"
    assert live.function is seam.function
    assert live.mark is not None
    assert live.original is original


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("Gone.forward", "has no class Gone"),
        ("double.forward", "has no class double"),
        ("Layer.gone", "Layer has no attribute gone: a seam replaces"),
        ("gone", "has no attribute gone: a seam replaces"),
    ],
)
def test_a_missing_object_has_no_live_name(upstream: Upstream, symbol: str, message: str) -> None:
    with pytest.raises(SeamError, match=re.escape(message)):
        resolve(upstream.load(), symbol)


def test_a_proxy_of_a_class_is_no_class(upstream: Upstream) -> None:
    """An overlay that went in through one would be in conflict at the next audit."""
    module = upstream.load()
    module.Layer = wrapt.ObjectProxy(module.Layer)

    with pytest.raises(SeamError, match="has no class Layer"):
        resolve(module, "Layer.forward")
    assert follow(module, "Layer.forward")[1:] == ("Layer", "Layer", False)


def test_an_object_that_raises_leads_nowhere() -> None:
    found = follow(Untouchable(), "Layer.forward")

    assert not found.is_complete
    assert found.own is NOTHING
    assert live_names.holder_of(Untouchable(), "double") is None
