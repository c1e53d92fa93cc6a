"""Repairs of another kind than ours, by edits that fit whatever would be replaced: upstream's, a vendor's or a user's own.

Those that are about one defect are in `otherwise_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adversary.mutants import Module
from adversary.outline import is_text


def _decorated(module: Module, symbol: str) -> str:
    node = module.outline.definitions[symbol]
    return module.with_((node, f"@repaired\n{module.indent(node) or ''}{module.code(node)}"))


def _wrapped(module: Module, symbol: str) -> str:
    return f"{module.text}\n\n{symbol} = repaired({symbol})\n"


def _handed_on(module: Module, symbol: str) -> str:
    name = symbol.rpartition(".")[2]
    node = module.outline.definitions[symbol]
    indent = module.indent(node) or ""
    return module.with_((node, f"def {name}(*args, **options):\n{indent}    return repaired(*args, **options)"))


def _before(module: Module, symbol: str) -> str:
    body = [each for each in module.outline.definitions[symbol].body if not is_text(each)]
    indent = module.indent(body[0]) or ""
    return module.with_((body[0], f"if needs_repair():\n{indent}    return repaired()\n{indent}{module.code(body[0])}"))


def _from_elsewhere(module: Module, symbol: str) -> str:
    owner, _, name = symbol.rpartition(".")
    return f"{module.text}\n\n" + (f"{owner}.{name} = vendor.{name}\n" if owner else f"from vendor import {name}\n")


WAYS: Mapping[str, Callable[[Module, str], str]] = {
    "decorated": _decorated,
    "wrapped behind it": _wrapped,
    "body handed on": _handed_on,
    "case handled before": _before,
    "from elsewhere": _from_elsewhere,
}
