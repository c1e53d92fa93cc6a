"""Names of the ways of a group, and the products that none of them can avoid. Standard library only."""

from __future__ import annotations

from report import Found


def floor(name: str, by_name: dict[str, Found]) -> float:
    """Return the time of the products that a way cannot avoid."""
    of = name.partition(",")[0]
    size = next(each for each in by_name if each.startswith("products, ") and (each.endswith("=1") == (of == "TP=1")))
    products = by_name[size]["stages"]
    again = products[0] if logits_of(name) == "recompute" else 0.0
    return float(sum(products) + again)


def logits_of(name: str) -> str:
    """Return whether a way recomputes or keeps the logits."""
    return name.split(", ")[1]
