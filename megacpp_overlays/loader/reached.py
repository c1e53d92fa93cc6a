"""Resolution of the symbols of an overlay in the running process, ignoring cached state.

It takes a few look-ups for each overlay: the target in `sys.modules`, the classes of the symbol, the attribute and its mark.
Other code may have replaced any of them since, executed the target again without a hook, or overridden a seam in a
subclass. Objects that hold an original outside of these names are found by a walk over the heap, see `aliases`.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader import known, ownership
from megacpp_overlays.loader.live_names import (
    NOTHING,
    LiveName,
    Owner,
    ResolvedSymbol,
    follow,
    holder_of,
    is_module,
    namespace,
    owner_name,
    resolve,
)
from megacpp_overlays.loader.seams import Seam, describe, identity
from megacpp_overlays.model import Overlay
from megacpp_overlays.runtime.seam_marks import Mark, mark_behind, mark_of, plain_function
from megacpp_overlays.source.trees import CachedTree, InstalledTree, readable


class ResolvedSymbols(NamedTuple):
    """The objects that the symbols of one overlay are bound to."""

    seams: tuple[Seam, ...] = ()
    """Installed seams of the overlay, wrapped or not."""
    lost: tuple[str, ...] = ()
    """A sentence for each symbol that does not lead to its seam."""
    around: tuple[str, ...] = ()
    """A sentence for each object that wraps or extends a seam and calls it."""
    others: tuple[str, ...] = ()
    """Names of all third-party code, the same in every process."""
    upstreams_own: bool = False
    """Whether a lost symbol is bound to upstream's own code again, because its module was executed again."""


def is_ours(mark: Mark | None, overlay: Overlay) -> bool:
    """Return whether a mark belongs to this part of this overlay."""
    if mark is None or mark.overlay_id != overlay.id:
        return False
    return getattr(mark, "module", "") in {"", overlay.target.module}  # older copies of this package have no `module`


def symbols_of(overlay: Overlay, shape: str | None = None) -> list[str]:
    """Return the symbols that an overlay replaces for a shape, or for any."""
    chosen = [overlay.repairs[shape]] if shape is not None else overlay.repairs.values()
    return list(dict.fromkeys(each.symbol for replacements in chosen for each in replacements))


def owners(overlay: Overlay) -> list[type]:
    """Return the classes that have the symbols of an overlay now."""
    return [each.owner for each in _live_names(overlay) if isinstance(each.owner, type)]


def replaceable(overlay: Overlay) -> Iterator[object]:
    """Yield the functions that an overlay may replace, as its target has them now, and the descriptors around them."""
    for each in _live_names(overlay):
        original = each.original
        yield original
        if (function := plain_function(original)) is not original:
            yield function


def _live_names(overlay: Overlay) -> Iterator[LiveName]:
    """Yield the live name of each symbol of an overlay that this release of its target has."""
    module: Any = sys.modules.get(overlay.target.module)
    for symbol in symbols_of(overlay) if is_module(module) else ():
        with contextlib.suppress(SeamError):
            live = resolve(module, symbol)
            if holder_of(*live) is not None:
                yield live


def resolve_symbols(overlay: Overlay, shape: str | None = None, *, explain: bool = False) -> ResolvedSymbols:
    """Resolve the symbols of an overlay, and describe the object of each symbol that does not lead to its seam.

    Args:
        overlay: the overlay of the symbols.
        shape: the shape for which it replaces them; None for any.
        explain: whether to check if the object in the place of a seam is upstream's own code, which may parse its module.
    """
    target = overlay.target.module
    module = sys.modules.get(target)
    if module is None:
        return ResolvedSymbols()
    resolved = ResolvedSymbols()
    for symbol in symbols_of(overlay, shape):
        resolved = _joined(resolved, _resolve_symbol(overlay, module, symbol, explain=explain))
    return resolved


def _joined(one: ResolvedSymbols, other: ResolvedSymbols) -> ResolvedSymbols:
    return ResolvedSymbols(
        one.seams + other.seams,
        one.lost + other.lost,
        one.around + other.around,
        one.others + other.others,
        one.upstreams_own or other.upstreams_own,
    )


def _resolve_symbol(overlay: Overlay, module: Any, symbol: str, *, explain: bool) -> ResolvedSymbols:
    target = overlay.target.module
    found = follow(module, symbol)
    where = f"{target}.{found.path}"
    if not found.is_complete:
        return _gone(where) if found.own is None or found.own is NOTHING else _replaced(where, found.own)
    holder = holder_of(found.owner, found.name)
    if holder is None:
        return _gone(where) if is_module(module) else _replaced(target, module)
    raw = namespace(holder)[found.name]
    mark = mark_behind(raw)
    if mark is None or not is_ours(mark, overlay):
        return _replaced(where, raw, upstreams_own=explain and _is_upstreams_own(overlay, found, symbol))
    held = raw if mark_of(raw) is not None else mark.made
    seam = Seam(holder, found.name, mark.original, held, mark.inherited, adopted=True)
    resolved = ResolvedSymbols(seams=(seam,))
    if held is not raw:
        reason, other = f"{where} is wrapped by {describe(raw)}", f"{where}: {identity(raw)}"
        resolved = _joined(resolved, ResolvedSymbols(around=(reason,), others=(other,)))
    return _joined(resolved, _overridden(found.owner, found.name, where, target))


def _replaced(where: str, found: Any, *, upstreams_own: bool = False) -> ResolvedSymbols:
    reason = f"{where} was replaced after us by {describe(found)}"
    if upstreams_own:
        reason = f"{where} is upstream's own again: it was executed past every hook; call megacpp_overlays.arm()"
    return ResolvedSymbols(lost=(reason,), others=(f"{where}: {identity(found)}",), upstreams_own=upstreams_own)


def _gone(where: str) -> ResolvedSymbols:
    return ResolvedSymbols(lost=(f"{where} was taken away after us",), others=(f"{where}: nothing",))


def _is_upstreams_own(overlay: Overlay, found: ResolvedSymbol, symbol: str) -> bool:
    tree = CachedTree(InstalledTree())
    source = readable(tree, overlay.target.module)
    try:
        place = known.places(overlay, tree).get(symbol)
        live = LiveName(found.owner, found.name)
        return source is not None and ownership.foreign_owner(live, symbol, source, place) is None
    except Exception:  # noqa: BLE001 - code that cannot be compared does not count as upstream's own
        return False


def _overridden(owner: Owner, name: str, where: str, target: str) -> ResolvedSymbols:
    """Return the subclasses that override a seam, without those in the target's own file, which the probe has read."""
    resolved = ResolvedSymbols()
    if not isinstance(owner, type):
        return resolved
    for each in _subclasses(owner):
        holder = holder_of(each, name)
        if holder is None or (holder is not each and issubclass(holder, owner)):
            continue  # the class inherits the seam, or the override of another subclass
        raw = namespace(holder)[name]
        if each.__module__ == target or mark_behind(raw) is not None or _never_returns(raw):
            continue
        override = f"{owner_name(each)}.{name}"
        if not _calls_up(raw, name, owner, each):
            reason = f"{override} overrides {where} and does not lead to it: {describe(raw)}"
            resolved = _joined(resolved, ResolvedSymbols(lost=(reason,), others=(f"{where}: {override}",)))
        # subclasses of upstream itself are not reported
        elif each.__module__.partition(".")[0] != target.partition(".")[0]:
            extended = ResolvedSymbols(around=(f"{override} extends {where}",), others=(f"{where}: {override}",))
            resolved = _joined(resolved, extended)
    return resolved


_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR"})


def _never_returns(raw: Any) -> bool:
    """Return whether a function only raises; such an override has no result that the seam would correct."""
    function = plain_function(raw)
    if type(function) is not FunctionType:
        return False
    return _RETURNS.isdisjoint(each.opname for each in dis.get_instructions(function.__code__))


def _subclasses(owner: type) -> Iterator[type]:
    found: dict[int, type] = {}
    waiting: list[type] = list(type.__subclasses__(owner))
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += type.__subclasses__(each)
    yield from sorted(found.values(), key=owner_name)


def _calls_up(raw: Any, name: str, owner: type, cls: type) -> bool:
    """Return whether the code of an override names the overridden method, as `super().name` and `Base.name` do.

    A class between it and the owner may be named as well; its own override is checked separately.
    """
    function = plain_function(raw)
    if type(function) is not FunctionType:
        return False
    names = set(_names_in(function.__code__))
    between = [base for base in cls.__mro__[1:] if issubclass(base, owner)]
    bases = {base.__name__ for base in (*owner.__mro__[:-1], *between)}
    return name in names and bool(names & {"super", "__class__", *bases})


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def names_of(objects: Iterable[Any]) -> dict[int, list[str]]:
    """Return the names in loaded modules that are bound to functions or classes, by the id of each."""
    wanted = {id(each) for each in objects}
    found: dict[int, list[str]] = {}
    # type() and not isinstance: a lazy module may import something when its __class__ is read.
    for module in [each for each in list(sys.modules.values()) if is_module(each)] if wanted else ():
        for name, value in list(namespace(module).items()):
            if id(value) in wanted:
                found.setdefault(id(value), []).append(f"{owner_name(module)}.{name}")
    return found
