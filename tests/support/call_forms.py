"""Run in a fresh interpreter: which forms of a call upstream's functions take and the seams in their place refuse, as JSON.

    python tests/support/call_forms.py MODULE...

Each module is imported, if it is there. Then every seam of every active overlay is compared with the function that it replaced. The seam's own
code is inspected, since its name, the counter of calls and `functools.wraps` around it would show upstream's signature.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import Any

import megacpp_overlays
from megacpp_overlays.loader import live_names
from megacpp_overlays.loader.live_names import LiveName
from megacpp_overlays.model import Decision
from megacpp_overlays.runtime.seam_marks import mark_of, plain_function

Form = tuple[list[str], list[str]]
"""Names of arguments given by position, and of arguments given by keyword."""
MORE = "one_more"


def forms(taken: Signature, *, of_instance: bool) -> Iterator[Form]:
    """Yield how a function may be called: each number of arguments by position, the others by keyword, with optional ones and without.

    Args:
        taken: its signature.
        of_instance: whether the first argument is always given by position, as `self` is.
    """
    given = [
        each for each in taken.parameters.values() if each.kind not in {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    ]
    ordered = [each for each in given if each.kind is not Parameter.KEYWORD_ONLY]
    kinds = {each.kind for each in taken.parameters.values()}
    least = max(sum(each.kind is Parameter.POSITIONAL_ONLY for each in ordered), int(of_instance))
    for count in range(least, len(ordered) + 1):
        by_position = [each.name for each in ordered[:count]]
        others = [each for each in given if each.name not in by_position]
        for named in (others, [each for each in others if each.default is Parameter.empty]):
            yield by_position, [each.name for each in named]
            if Parameter.VAR_KEYWORD in kinds:
                yield by_position, [*(each.name for each in named), MORE]
    if Parameter.VAR_POSITIONAL in kinds:
        yield (
            [*(each.name for each in ordered), MORE],
            [each.name for each in given if each.kind is Parameter.KEYWORD_ONLY],
        )


def takes(taken: Signature, form: Form) -> bool:
    by_position, by_name = form
    try:
        taken.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def differences(original: Any, ours: Any, *, of_instance: bool) -> list[str]:
    """Return calls that upstream's function takes and ours does not, arguments that change their place, and other defaults."""
    theirs, own = inspect.signature(original), inspect.signature(ours, follow_wrapped=False)
    found = []
    for form in forms(theirs, of_instance=of_instance):
        assert takes(theirs, form), (original, form)
        if not takes(own, form):
            found.append(f"({', '.join([*form[0], *(f'{name}=' for name in form[1])])})")
            continue
        bound = own.bind(*form[0], **{name: name for name in form[1]}).arguments
        found += [
            f"{name} gets {value}"
            for name, value in bound.items()
            if name in theirs.parameters and isinstance(value, str) and name != value
        ]
    for name, parameter in own.parameters.items():
        if name in theirs.parameters and parameter.default is not Parameter.empty:
            default = theirs.parameters[name].default
            if not (parameter.default is default or parameter.default == default):
                found.append(f"{name}={parameter.default!r} where upstream has {default!r}")
    return list(dict.fromkeys(found))


def compared(symbols: dict[str, LiveName]) -> dict[str, list[str]]:
    """Return the differences, by seam."""
    found = {}
    for symbol, live in symbols.items():
        raw = live.raw
        mark = mark_of(raw)
        assert mark is not None, symbol
        ours = inspect.getclosurevars(mark.made).nonlocals["function"]  # the function that the counter of calls wraps
        of_instance = isinstance(live.owner, type) and not isinstance(raw, staticmethod)
        found[symbol] = differences(plain_function(mark.original), ours, of_instance=of_instance)
    return found


def placed() -> dict[str, LiveName]:
    """Return where the seams of active overlays are."""
    found = {}
    for record in megacpp_overlays.audit().records:
        module = sys.modules.get(record.overlay.target.module)
        if record.decision is Decision.ACTIVE and module is not None:
            for each in record.overlay.repairs[record.finding.shape]:
                found[f"{record.overlay.id}: {each.symbol}"] = live_names.resolve(module, each.symbol)
    return found


def main() -> None:
    """Answer on standard output."""
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.stdout.write(json.dumps(compared(placed())))


if __name__ == "__main__":
    main()
