"""A function, a method or a class is known by its body, and only where its name can have no other value."""

from __future__ import annotations

import ast

import pytest

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.known_bodies import check_known
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource

FUNCTION = "def forward(x):\n    return x + 1\n"
READ = {fingerprint(ast.parse(FUNCTION).body[0])}


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def check(text: str, symbol: str = "forward") -> None:
    check_known(ModuleSource("package.entry", "entry.py", text), symbol, READ)


def in_try(rest: str, before: str = "    import kernels\n") -> str:
    return f"try:\n{before}{indented(FUNCTION)}{rest}"


@pytest.mark.parametrize(
    "text",
    [
        FUNCTION,
        f"import kernels\n\n\n{FUNCTION}",
        in_try("except ImportError:\n    print('there are no kernels')\n"),
        in_try("except ImportError:\n    raise RuntimeError('install the kernels')\n"),
        in_try("except ImportError:\n    pass\nelse:\n    print('there are kernels')\nfinally:\n    done = True\n"),
        f"try:\n{indented(in_try('except ImportError: pass'))}except OSError:\n    pass\n",
    ],
    ids=["alone", "after an import", "a handler that warns", "a handler that raises", "else and finally", "try in try"],
)
def test_a_function_that_is_bound_to_its_body_or_to_nothing_is_known(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (in_try("except ImportError:\n    def forward(x):\n        return x\n"), "defined 2 times"),
        (in_try("except ImportError:\n    forward = None\n"), "bound elsewhere"),
        (in_try("except ImportError:\n    from .slow import forward\n"), "bound elsewhere"),
        (in_try("except ImportError:\n    from .slow import *\n"), "bound elsewhere"),
        (in_try("except ImportError:\n    globals()['forward'] = print\n"), "bound elsewhere"),
        (in_try("except ImportError as forward:\n    pass\n"), "bound elsewhere"),
        (in_try("finally:\n    del forward\n"), "bound elsewhere"),
        (in_try("except ImportError: pass\n\n\ndef __getattr__(name):\n    return print\n"), "may be found in its place"),
        (f"try:\n    import kernels\nexcept ImportError:\n{indented(FUNCTION)}", "under a condition"),
        (f"try:\n    import kernels\nexcept ImportError:\n    pass\nelse:\n{indented(FUNCTION)}", "under a condition"),
        (f"try:\n    import kernels\nfinally:\n{indented(FUNCTION)}", "under a condition"),
        (f"try:\n    if FLAG:\n{indented(indented(FUNCTION))}except ImportError:\n    pass\n", "under a condition"),
        (f"if FLAG:\n{indented(FUNCTION)}", "under a condition"),
        (f"if FLAG:\n{indented(in_try('except ImportError: pass'))}", "under a condition"),
        (f"for _ in range(1):\n{indented(FUNCTION)}", "under a condition"),
        (in_try("except ImportError: pass\n").replace("x + 1", "x + 2"), "unknown body"),
        ("", "has no forward"),
    ],
)  # fmt: skip
def test_a_function_that_may_be_another_one_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        check(text)


def test_a_method_below_try_is_refused_because_another_one_may_be_inherited() -> None:
    with pytest.raises(SourceError, match="under a condition"):
        check(f"class Entry(Base):\n{indented(in_try('except ImportError: pass'))}", "Entry.forward")
