"""A race of contestants in which no starting place is an advantage."""

from __future__ import annotations


def test_every_other_round_takes_contestants_in_reverse() -> None:
    import timing

    order: list[str] = []
    contestants = {name: (lambda name=name: order.append(name),) for name in ("one", "two", "three")}

    found = timing.race(contestants, "cpu", rounds=3)

    warm_up, rounds = order[:6], order[6:]
    assert warm_up == ["one", "one", "two", "two", "three", "three"]
    assert rounds == ["one", "two", "three", "three", "two", "one", "one", "two", "three"]
    assert {name: one["calls"] for name, one in found.items()} == {"one": 3, "two": 3, "three": 3}
