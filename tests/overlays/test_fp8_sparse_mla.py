"""The registry in which an FP8-aware SparseMLA kernel is registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megacpp_overlays import fp8_sparse_mla
from megacpp_overlays.errors import RegistryError


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    assert fp8_sparse_mla.registered() is None
    yield
    assert fp8_sparse_mla.registered() is None


def kernel(*_: Any, **__: Any) -> None:
    """Decline."""


def test_a_kernel_is_registered_until_it_is_forgotten() -> None:
    forget = fp8_sparse_mla.register(kernel)
    assert fp8_sparse_mla.registered() is kernel
    forget()
    assert fp8_sparse_mla.registered() is None
    forget()


def test_the_same_kernel_may_register_again() -> None:
    forget = fp8_sparse_mla.register(kernel)
    fp8_sparse_mla.register(kernel)()
    forget()


def test_a_second_kernel_is_refused_by_name() -> None:
    forget = fp8_sparse_mla.register(kernel)
    with pytest.raises(RegistryError, match=r"\.kernel is registered already; forget it before .*<lambda>"):
        fp8_sparse_mla.register(lambda *_: None)
    assert fp8_sparse_mla.registered() is kernel
    forget()


def test_forgetting_a_kernel_does_not_touch_its_successor() -> None:
    forget_first = fp8_sparse_mla.register(kernel)
    forget_first()

    def successor(*_: Any) -> None:
        """Decline."""

    forget_second = fp8_sparse_mla.register(successor)
    forget_first()
    assert fp8_sparse_mla.registered() is successor
    forget_second()


def test_an_object_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(RegistryError, match="must be callable, not 3"):
        fp8_sparse_mla.register(3)  # type: ignore[arg-type]
