"""Numbers that tests draw are those of their names, in any order and in any company."""

from __future__ import annotations

import random

import numpy as np
import pytest
import seeds
import torch


def _numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture(scope="module")
def drawn() -> tuple[float, float, float]:
    """Random numbers that a fixture draws."""
    return _numbers()


def test_a_name_gives_its_numbers_again_and_another_name_others() -> None:
    with seeds.drawing("one"):
        first = _numbers()
    with seeds.drawing("other"):
        other = _numbers()
    with seeds.drawing("one"):
        again = _numbers()

    assert again == first
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_who_drew_before_finds_its_next_numbers_afterwards() -> None:
    with seeds.drawing("before"):
        _numbers()
        expected = _numbers()

    with seeds.drawing("before"):
        _numbers()
        with seeds.drawing("between"):
            _numbers()
        found = _numbers()

    assert found == expected


def test_random_numbers_of_a_test_depend_on_its_own_name(request: pytest.FixtureRequest) -> None:
    found = _numbers()

    with seeds.drawing(request.node.nodeid):
        assert found == _numbers()


def test_random_numbers_of_a_fixture_depend_on_its_own_name(drawn: tuple[float, float, float]) -> None:
    with seeds.drawing(f"tests/project/{__name__.rpartition('.')[2]}.py::drawn[0]"):
        assert drawn == _numbers()
