"""The registry of declarations: it finds them, orders them and checks them before anything is armed."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from made_up import Upstream, install_plugin

from megacpp_overlays import overlays
from megacpp_overlays.errors import RegistryError, SettingsError
from megacpp_overlays.loader import registry
from megacpp_overlays.model import Replacement


def identity(original: Any, _: Any) -> Any:
    return original


def test_overlays_of_this_package_are_found_and_ordered_by_pack_and_id() -> None:
    loaded = registry.load()

    keys = [(overlay.pack, overlay.id) for overlay in loaded]
    assert keys == sorted(keys)
    assert {"float16-fp32-exemption", "liger-flce-none-backward"} <= {overlay.id for overlay in loaded}


def test_an_overlay_is_named_after_its_module() -> None:
    declared = {overlay.id.replace("-", "_") for overlay in registry.load()}

    assert declared == {found.name for found in pkgutil.iter_modules(overlays.__path__)}


def test_overlays_are_found_in_an_archive_too(tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]) -> None:
    package = Path(registry.__file__).parents[1]
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for folder, _, names in os.walk(package, followlinks=True):  # overlays and probes are links in a checkout
            for name in [name for name in names if name.endswith(".py")]:
                file = Path(folder, name)
                archive.write(file, file.relative_to(package.parent))
    code = (
        "import sys; sys.path.remove(''); import megacpp_overlays; from megacpp_overlays.loader import session;"
        "print(megacpp_overlays.__file__, *dict.fromkeys(overlay.id for overlay in session.current().overlays))"
    )

    file, *ids = run_python(code, tmp_path / "package.zip").stdout.split()

    assert file.startswith(str(tmp_path))
    assert ids == list(dict.fromkeys(overlay.id for overlay in registry.load()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "Double"}, "id 'Double' is not lower-case words"),
        ({"id": "double--fix"}, "is not lower-case words"),
        ({"id": "2-fix"}, "is not lower-case words"),
        ({"id": "döuble"}, "is not lower-case words"),
        ({"id": ""}, "is not lower-case words"),
        ({"id": 2}, "a field has the wrong type"),
        ({"title": " "}, "title is empty"),
        ({"breaks": ""}, "breaks is empty"),
        ({"retire_when": ""}, "retire_when is empty"),
        ({"last_validated": ""}, "last_validated is empty"),
        ({"replacements": {}}, "a shape without seams belongs in `unsupported`"),
        ({"replacements": {"off-by-one": ()}}, "a shape without seams belongs in `unsupported`"),
        ({"unsupported": {"off-by-one": "no"}}, "off-by-one is both repaired and unsupported"),
    ],
)
def test_an_incomplete_declaration_is_refused(upstream: Upstream, change: dict[str, Any], says: str) -> None:
    with pytest.raises(RegistryError, match=f"here: .*{says}"):
        registry.check([("here", upstream.overlay(**change))])


def test_the_retired_argument_is_refused_and_the_error_names_the_code_to_delete(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = upstream.overlay()
    fields = {field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)}

    with pytest.raises(RegistryError, match=r"double-fix declares `retired`, .* Delete the argument and the function"):
        type(declared)(**fields, retired=lambda tree: False)

    assert type(declared)(**fields).variable == declared.variable


def test_an_object_that_is_no_overlay_is_refused() -> None:
    with pytest.raises(RegistryError, match="here declares None where an Overlay is expected"):
        registry.check([("here", None)])


def test_two_overlays_cannot_share_an_id(upstream: Upstream) -> None:
    with pytest.raises(RegistryError, match="there and here both declare double-fix"):
        registry.check([("here", upstream.overlay()), ("there", upstream.overlay())])


def test_two_overlays_cannot_replace_the_same_symbol(upstream: Upstream) -> None:
    other = upstream.overlay(id="other-fix")

    with pytest.raises(RegistryError, match=r"there and here both replace .*\.layers\.double"):
        registry.check([("here", upstream.overlay()), ("there", other)])

    elsewhere = {"off-by-one": (Replacement(symbol="Layer.forward", make=identity),)}
    assert len(registry.check([("here", upstream.overlay()), ("there", replace(other, replacements=elsewhere))])) == 2


def test_a_plugin_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="names no-such-plugin, which is not installed; known: none"):
        registry.load(["no-such-plugin"])


def test_a_plugin_is_loaded_only_when_it_is_named(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream.write("OVERLAY = 'not an overlay'\n", module="plugin")
    install_plugin(upstream.folder, f"{upstream.name}.plugin:OVERLAY", name="ours")

    assert registry.load()
    with pytest.raises(RegistryError, match="plugin ours declares 'not an overlay'"):
        registry.load(["ours"])
