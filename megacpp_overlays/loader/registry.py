"""Registry: loads the declarations of all overlays, in order, and checks them before anything is armed."""

from __future__ import annotations

import importlib
import inspect
import os
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

from megacpp_overlays import overlays as package
from megacpp_overlays.errors import RegistryError, SettingsError
from megacpp_overlays.loader.import_hooks import is_initializing
from megacpp_overlays.model import Erratum, Gate, Overlay, variable_for

PLUGIN_GROUP = "megacpp_overlays.overlays"

_LETTERS = frozenset(string.ascii_lowercase)
_LETTERS_AND_DIGITS = _LETTERS | frozenset(string.digits)


class HalfImportedPluginError(RegistryError):
    """Raised when the module of a plugin is still being imported, so that its declarations cannot be read yet.

    Attributes:
        module: the module.
    """

    def __init__(self, text: str, module: ModuleType) -> None:
        super().__init__(text)
        self.module = module


def load(plugins: Sequence[str] = ()) -> tuple[Erratum, ...]:
    """Return every overlay and gate of this package and of the named plugins, by pack and id.

    A module below `megacpp_overlays.overlays` declares its overlay as `OVERLAY`, or as `PARTS` if the defect is
    in several modules: declarations with one id and different targets. No name is registered here: a new file is a new overlay.

    Raises:
        RegistryError: a declaration is incomplete, collides with another, or a plugin has the id of a retired overlay.
        SettingsError: a named plugin is not installed.
    """
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in built_in()]
    declared = [(module.__name__, part) for module in modules for part in _parts(_declaration(module))]
    declared += [(f"plugin {name}", part) for name in dict.fromkeys(plugins) for part in _parts(_load_plugin(name))]
    overlays = check(declared)
    if plugins:  # a test checks this package's own overlays, so that no launcher needs to read the retired ones
        refuse_retired(overlays)
    return overlays


def one(name: str) -> tuple[Erratum, ...]:
    """Return every part of one declaration of this package, without loading any other.

    Args:
        name: its id. Its dependencies are not checked, so the function is meant for gates.
    """
    module = importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
    return check((module.__name__, part) for part in _parts(_declaration(module)))


def refuse_retired(overlays: Iterable[Erratum]) -> None:
    """Check that no overlay has the id of a retired one, because its variable and reproducer would change their meaning.

    Raises:
        RegistryError: an overlay has such an id.
    """
    from megacpp_overlays.loader import retired  # noqa: PLC0415

    gone = {variable_for(each.id): each for each in retired.read()}
    for overlay in overlays:
        if (there := gone.get(overlay.variable)) is not None:
            raise RegistryError(f"{overlay.id} needs another id: {there}")


def built_in() -> list[str]:
    """Return the names of the modules that declare an overlay, in order."""
    try:
        files = [name for folder in package.__path__ for name in os.listdir(folder)]
    except NotADirectoryError:  # imported from an archive
        import pkgutil  # noqa: PLC0415 - no folder needs it

        return sorted(found.name for found in pkgutil.iter_modules(package.__path__))
    return sorted({name for file in files if (name := inspect.getmodulename(file)) and name != "__init__"})


def _declaration(module: ModuleType) -> object:
    return getattr(module, "PARTS", None) or getattr(module, "OVERLAY", None)


def _parts(declared: object) -> tuple[object, ...]:
    """Return the parts of a declaration; a single overlay is its only part."""
    return declared if isinstance(declared, tuple) else (declared,)


def check(declared: Iterable[tuple[str, object]]) -> tuple[Erratum, ...]:
    """Return the declared overlays in order, or raise for the first invalid declaration.

    Raises:
        RegistryError: the message names the declaration and the error in it.
    """
    overlays: list[Erratum] = []
    first: dict[str, tuple[str, Erratum]] = {}
    symbols: dict[tuple[str, str], str] = {}
    for origin, overlay in declared:
        if not isinstance(overlay, Overlay | Gate):
            raise RegistryError(f"{origin} declares {overlay!r} where an Overlay is expected")
        try:
            _check_fields(origin, overlay)
        except (TypeError, AttributeError) as error:
            raise RegistryError(f"{origin}: a field has the wrong type: {error}") from error
        elsewhere, part = first.setdefault(variable_for(overlay.id), (origin, overlay))
        if part is not overlay:
            if elsewhere != origin:
                raise RegistryError(f"{origin} and {elsewhere} both declare {overlay.id}")
            _check_part(origin, part, overlay)
            if any(o.id == overlay.id and o.target.module == overlay.target.module for o in overlays):
                raise RegistryError(f"{origin}: two parts of {overlay.id} are about {overlay.target.module}")
        for symbol in _replaced(overlay):
            place = (overlay.target.module, symbol)
            if place in symbols:
                raise RegistryError(f"{origin} and {symbols[place]} both replace {'.'.join(place)}")
            symbols[place] = origin
        overlays.append(overlay)
    _check_needs(first)
    _check_needed_parts(overlays)
    return tuple(sorted(overlays, key=lambda overlay: (overlay.pack, overlay.id)))


def _check_part(origin: str, one: Erratum, other: Erratum) -> None:
    """Check that two parts belong to one overlay: they share the switch, the ledger entry and each descriptive text."""
    for name in ("id", "pack", "title", "breaks", "retire_when", "threads", "needs", "symptoms", "concerns"):
        if getattr(one, name, ()) != getattr(other, name, ()):
            raise RegistryError(f"{origin}: the parts of {one.id} do not agree on {name}")


def _check_needs(declared: Mapping[str, tuple[str, Erratum]]) -> None:
    """Check the dependencies between overlays: each names an overlay, and there is no cycle."""
    needs = {each.id: (origin, each.needs) for origin, each in declared.values() if isinstance(each, Overlay)}
    for overlay_id, (origin, wanted) in needs.items():
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name not in needs:
                raise RegistryError(f"{origin}: {overlay_id} needs {name}, which is no overlay")
            if name == overlay_id:
                raise RegistryError(f"{origin}: {overlay_id} needs itself")
            waiting += needs[name][1]


def _check_needed_parts(declared: Iterable[Erratum]) -> None:
    """Check the dependencies between parts: each names another part of the same overlay, and there is no cycle."""
    parts = {(each.id, each.target.module): each.needs_parts for each in declared if isinstance(each, Overlay)}
    for (overlay_id, module), wanted in parts.items():
        waiting, seen = list(wanted), set[str]()
        while waiting:
            needed = waiting.pop()
            if (overlay_id, needed) not in parts:
                raise RegistryError(f"{overlay_id} on {module} needs its part on {needed}, which it does not have")
            if needed == module:
                raise RegistryError(f"{overlay_id} on {module} needs itself")
            waiting += [] if needed in seen else parts[overlay_id, needed]
            seen.add(needed)


def _replaced(declared: Erratum) -> set[str]:
    return {item.symbol for items in declared.repairs.values() for item in items}


def is_id(text: str) -> bool:
    """Return whether a text can be the id of an overlay: lower-case words joined by hyphens."""
    words = text.split("-")
    return text[:1] in _LETTERS and all(word and _LETTERS_AND_DIGITS.issuperset(word) for word in words)


def _check_fields(origin: str, declared: Erratum) -> None:
    """Check the fields of a declaration: first the common ones, then those of its kind."""
    if not is_id(declared.id):
        raise RegistryError(f"{origin}: id {declared.id!r} is not lower-case words joined by hyphens")
    for name in ("title", "breaks", "retire_when", "last_validated"):
        if not getattr(declared, name).strip():
            raise RegistryError(f"{origin}: {name} is empty")
    if type(declared.symptoms) is not tuple or not all(each.strip() for each in declared.symptoms):
        raise RegistryError(f"{origin}: symptoms {declared.symptoms!r} is no tuple of texts")
    if not isinstance(declared.concerns, str):
        raise RegistryError(f"{origin}: concerns {declared.concerns!r} is no text")
    if not isinstance(declared.pack, int):
        raise RegistryError(f"{origin}: pack {declared.pack!r} is no number")
    if not callable(declared.probe):
        raise RegistryError(f"{origin}: probe cannot be called")
    if isinstance(declared, Overlay):
        _check_overlay(origin, declared)
    elif not declared.unsupported or not all(text.strip() for text in declared.unsupported.values()):
        raise RegistryError(f"{origin}: a gate without advice for a shape is no gate")


def _check_overlay(origin: str, overlay: Overlay) -> None:
    if not callable(overlay.self_test):
        raise RegistryError(f"{origin}: self_test cannot be called")
    if not isinstance(overlay.opt_in, bool):
        raise RegistryError(f"{origin}: opt_in {overlay.opt_in!r} is neither True nor False")
    if type(overlay.needs) is not tuple:
        raise RegistryError(f"{origin}: needs {overlay.needs!r} is no tuple of ids")
    if type(overlay.needs_parts) is not tuple:
        raise RegistryError(f"{origin}: needs_parts {overlay.needs_parts!r} is no tuple of modules")
    if not overlay.replacements or not all(overlay.replacements.values()):
        raise RegistryError(f"{origin}: a shape without seams belongs in `unsupported`")
    if both := overlay.replacements.keys() & overlay.unsupported.keys():
        raise RegistryError(f"{origin}: {', '.join(sorted(both))} is both repaired and unsupported")


def _load_plugin(name: str) -> object:
    import importlib_metadata  # noqa: PLC0415 - only for plugins

    found = importlib_metadata.entry_points(group=PLUGIN_GROUP)
    if name not in found.names:
        from megacpp_overlays.near_names import suggestion  # noqa: PLC0415 - only on the way to an error

        near = suggestion(name, sorted(found.names), where="`megacpp-overlays info`")
        raise SettingsError(f"MEGACPP_OVERLAYS_PLUGINS names {name}, which is not installed; {near}")
    module = sys.modules.get(found[name].module)
    if module is not None and is_initializing(module):
        raise HalfImportedPluginError(f"plugin {name} imports megacpp_overlays and is not imported to its end", module)
    try:
        return found[name].load()
    except Exception as error:  # an ImportError would read as "this optional package is missing"
        raise RegistryError(f"plugin {name} cannot be loaded: {type(error).__name__}: {error}") from error
