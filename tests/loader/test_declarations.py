"""Arming reads a list; the declarations are loaded when a target is imported, or an audit asks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from made_up import FIXED_TEXT, Upstream

from megacpp_overlays.errors import ActivationError, RegistryError
from megacpp_overlays.loader import declarations, registry
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.listed import LISTED, DeclarationSummary
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogLevel, Mode, Settings
from megacpp_overlays.model import Decision, Erratum

LOADED = (
    "import sys, megacpp_overlays;"
    "print(*(name for name in sys.modules if name.startswith('megacpp_overlays.overlays.')))"
)


def test_the_list_equals_the_declarations() -> None:
    assert declarations.listed(registry.load()) == LISTED, "run scripts/list_overlays.py"


def test_arming_loads_no_declaration_whose_target_is_nowhere(
    tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    package = Path(declarations.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(package)!r}); sys.path[:] = [p for p in sys.path if 'site-' not in p];"
    libraries = tmp_path / "libraries"  # the dependencies of this package, without any upstream
    libraries.mkdir()
    for name in ("wrapt", "importlib_metadata", "zipp", "packaging"):
        if (found := sys.modules.get(name)) is not None and found.__file__ is not None:
            (libraries / name).symlink_to(Path(found.__file__).parent)

    loaded = run_python(code + LOADED, libraries).stdout.split()

    assert loaded == []


@pytest.fixture
def with_tilelang(tmp_path: Path) -> Path:
    """A folder with a torch and a TileLang in which nothing is as in any release."""
    (tmp_path / "tilelang").mkdir()
    for name in ("torch", "tilelang/__init__", "tilelang/language"):
        (tmp_path / f"{name}.py").touch()
    return tmp_path


@pytest.mark.parametrize("first", ["", "import torch;"], ids=["torch is imported later", "torch is there"])
def test_a_gate_whose_target_is_there_is_asked_when_torch_is(
    with_tilelang: Path, run_python: Callable[..., CompletedProcess[str]], first: str
) -> None:
    done = run_python(f"{first}{LOADED};import torch;{LOADED}", with_tilelang)

    before, after = (line.split() for line in done.stdout.splitlines())
    assert bool(before) is bool(first)
    assert "megacpp_overlays.overlays.tilelang_grouped_reduce" in after
    assert "megacpp_overlays.overlays.liger_flce_none_backward" not in after
    assert done.stderr.count("conflict: tilelang-grouped-reduce") == 1


def test_torch_can_be_imported_where_a_gate_cannot_be_asked(
    with_tilelang: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    absent = "import sys; sys.modules['megacpp_overlays.overlays.tilelang_grouped_reduce'] = None;"

    done = run_python(f"{absent}import megacpp_overlays, torch;print(torch.__name__)", with_tilelang)

    assert done.stdout.split() == ["torch"]
    assert "WARNING conflict: the gates cannot be loaded, and none of them warns: " in done.stderr


def test_overlays_that_are_switched_on_or_off_are_known_from_the_list(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    said = run_python(
        LOADED,
        MEGACPP_OVERLAYS_DISABLE="hybrid-linear-ce,tilelang-grouped-reduce",
        MEGACPP_OVERLAY_CP_LOCAL_LOSS_MEAN="on",
        MEGACPP_OVERLAY_CUDNN_SDPA_QUERY_GRADIENT="on",
        MEGACPP_OVERLAY_FLOAT16_MIXER_PARAMETERS="on",
        MEGACPP_OVERLAY_GLOBAL_AUX_LOSS_SCALE="on",
        MEGACPP_OVERLAY_LATENT_MOE_FC2_INIT="on",
        MEGACPP_OVERLAY_LIGER_FLCE_LABELLED="on",
        MEGACPP_OVERLAY_MLA_SOFTMAX_SCALE="on",
        MEGACPP_OVERLAY_MTP_TOKEN_COUNTS_LOCAL="on",
        MEGACPP_OVERLAY_MUON_GATED_FC1="on",
        MEGACPP_OVERLAY_TP_LABEL_SMOOTHING="on",
        MEGACPP_OVERLAY_TRAINER_MOE_AUX_LOSS="on",
        MEGACPP_OVERLAYS_LOG_LEVEL="debug",
    ).stderr.splitlines()[0]

    head, waiting, off = said.split("; ")
    assert head == "[megacpp_overlays] mode auto"
    overlays = [each.id for each in LISTED if each.installs and each.id != "hybrid-linear-ce"]
    assert waiting == f"armed: {', '.join(overlays)}"
    assert off == "off: hybrid-linear-ce, tilelang-grouped-reduce"


@dataclass
class Listing:
    """A list of one made-up overlay, and how often its declaration was loaded."""

    upstream: Upstream
    sessions: list[Session] = field(default_factory=list)
    loads: int = 0
    error: Exception | None = None

    def load(self, _: object = ()) -> tuple[Erratum, ...]:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return (self.upstream.overlay(),)

    def session(self, **settings: object) -> Session:
        made = Session(declarations.of(()), Settings(**settings))  # type: ignore[arg-type]
        self.sessions.append(made)
        return made


@pytest.fixture
def listing(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listing]:
    made = Listing(upstream)
    listed = DeclarationSummary("double-fix", installs=True, off_by_default=False, targets=(upstream.module_name,))
    monkeypatch.setattr(declarations, "LISTED", (listed,))
    monkeypatch.setattr(registry, "built_in", lambda: ["double_fix"])
    monkeypatch.setattr(registry, "load", made.load)
    yield made
    made.error = None
    for each in made.sessions:
        each._hooks.close()
        with contextlib.suppress(RegistryError):  # the list differs from the declarations
            each.undo()


def test_the_first_import_of_a_target_loads_its_declarations_and_decides_them(listing: Listing) -> None:
    armed = listing.session()
    armed.arm()
    before = listing.loads

    module = listing.upstream.load()

    assert before == 0
    assert module.double(2) == 4
    assert [record.decision for record in armed.audit().records] == [Decision.ACTIVE]
    assert listing.loads == 1


def test_an_audit_loads_the_declarations(listing: Listing) -> None:
    armed = listing.session()
    armed.arm()

    assert [record.decision for record in armed.audit().records] == [Decision.ARMED]
    assert listing.loads == 1


def test_a_target_that_was_imported_before_is_settled_when_the_session_is_armed(listing: Listing) -> None:
    module = listing.upstream.load()

    listing.session().arm()

    assert module.double(2) == 4


def test_waiting_overlays_are_logged_once_however_often_a_session_is_armed(
    listing: Listing, capsys: pytest.CaptureFixture[str]
) -> None:
    armed = listing.session(log_level=LogLevel.DEBUG)
    armed.arm()
    armed.arm()
    armed.audit()
    armed.arm()

    assert capsys.readouterr().err.splitlines() == ["[megacpp_overlays] mode auto; armed: double-fix"]


def test_undoing_before_any_import_keeps_the_overlay_out(listing: Listing) -> None:
    armed = listing.session()
    armed.arm()
    armed.undo("double-fix")

    assert listing.upstream.load().double(2) == 5
    assert [record.decision for record in armed.audit().records] == [Decision.DISABLED]


def test_declarations_that_cannot_be_loaded_leave_the_target_as_it_is_and_are_said(
    listing: Listing, capsys: pytest.CaptureFixture[str]
) -> None:
    armed = listing.session()
    armed.arm()
    listing.error = OSError("the disk is gone")

    module = listing.upstream.load()

    assert module.double(2) == 5
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"[megacpp_overlays] WARNING conflict: the overlays of {listing.upstream.module_name} cannot be loaded, "
        "and none of them is in: OSError: the disk is gone"
    )
    with pytest.raises(OSError, match="the disk is gone"):
        armed.audit()


def test_an_audit_decides_overlays_that_could_not_be_loaded_at_the_import(listing: Listing) -> None:
    armed = listing.session()
    armed.arm()
    listing.error = MemoryError()
    module = listing.upstream.load()
    listing.error = None

    assert [record.decision for record in armed.audit().records] == [Decision.ACTIVE]
    assert module.double(2) == 4


def test_strict_refuses_a_target_whose_overlays_cannot_be_loaded(listing: Listing) -> None:
    listing.session(mode=Mode.STRICT).arm()
    listing.error = OSError("the disk is gone")

    with pytest.raises(ActivationError, match="cannot be loaded"):
        listing.upstream.load()


def test_a_list_that_differs_from_the_declarations_is_refused(
    listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = declarations.LISTED[0]._replace(targets=("somewhere.before",))
    monkeypatch.setattr(declarations, "LISTED", (stale,))
    armed = listing.session()
    armed.arm()

    with pytest.raises(RegistryError, match=r"loader/listed\.py is not the list of the overlays that are there"):
        armed.audit()


def test_a_declaration_that_no_list_has_is_loaded_at_once(listing: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "LISTED", ())
    listing.upstream.write(FIXED_TEXT)

    listing.session().arm()

    assert listing.loads == 1


def test_the_list_of_parts_names_every_target(upstream: Upstream) -> None:
    one, other = upstream.overlay(), upstream.overlay(target=upstream.overlay().target._replace(module="b.c"))

    (listed,) = Declarations([one, other]).listed

    assert listed.targets == (upstream.module_name, "b.c")
