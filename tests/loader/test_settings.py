"""The environment: every known word means one thing, every unknown word is refused with the nearest."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.settings import LogForm, Mode, Settings, Switch, plugin_names

IDS = ("scale-pad", "flce-none")


def test_an_empty_environment_means_auto() -> None:
    settings = Settings.from_env({"PATH": "/bin"}, IDS)

    assert settings == Settings(mode=Mode.AUTO, disabled=frozenset(), log=LogForm.STDERR, log_path=None, rank=0)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_is_read_in_any_case_and_with_spaces(mode: Mode) -> None:
    assert Settings.from_env({"MEGACPP_OVERLAYS": f" {mode.value.upper()} "}, IDS).mode is mode


def test_an_empty_value_counts_as_not_set() -> None:
    env = {"MEGACPP_OVERLAYS": "", "MEGACPP_OVERLAY_SCALE_PAD": " ", "MEGACPP_OVERLAYS_LOG": ""}

    assert Settings.from_env(env, IDS) == Settings()


@pytest.mark.parametrize(
    "env",
    [
        {"MEGACPP_OVERLAY_SCALE_PAD": "off"},
        {"MEGACPP_OVERLAYS_DISABLE": "scale-pad"},
        {"MEGACPP_OVERLAYS_DISABLE": " scale-pad ,", "MEGACPP_OVERLAY_SCALE_PAD": "OFF"},
    ],
    ids=["variable", "list", "both"],
)
def test_one_overlay_is_switched_off_by_its_variable_or_by_the_list(env: dict[str, str]) -> None:
    settings = Settings.from_env(env, IDS)

    assert settings.switch("scale-pad") is Switch.OFF
    assert settings.switch("flce-none") is Switch.AUTO


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"MEGACPP_OVERLAYS": "of"}, "MEGACPP_OVERLAYS=of is not known; did you mean off"),
        ({"MEGACPP_OVERLAYS": "1"}, "known: auto, observe, off, strict"),
        ({"MEGACPP_OVERLAY_SCALEPAD": "off"}, "did you mean MEGACPP_OVERLAY_SCALE_PAD"),
        ({"MEGACPP_OVERLAY": "off"}, "did you mean MEGACPP_OVERLAYS"),
        ({"MEGACPP_OVERLAYS_DISABLED": "scale-pad"}, "did you mean MEGACPP_OVERLAYS_DISABLE"),
        ({"MEGACPP_OVERLAY_SCALE_PAD": "0"}, "known: auto, off"),
        ({"MEGACPP_OVERLAYS_DISABLE": "flce-nune"}, "did you mean flce-none"),
        ({"MEGACPP_OVERLAYS_LOG": "stderrr"}, "did you mean stderr"),
        ({"MEGACPP_OVERLAYS_LOG": "audit"}, r"\./audit"),
        ({"MEGACPP_OVERLAYS_DISABLE": "scale-pad", "MEGACPP_OVERLAY_SCALE_PAD": "auto"}, "remove one of the two"),
    ],
)
def test_an_unknown_name_or_value_is_refused_with_the_nearest_known_one(env: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.from_env(env, IDS)


@pytest.mark.parametrize(
    ("text", "form", "path"),
    [
        ("logging", LogForm.LOGGING, None),
        ("json", LogForm.JSON, None),
        ("./audit", LogForm.FILE, "./audit"),
        ("/var/log/Overlays.jsonl", LogForm.FILE, "/var/log/Overlays.jsonl"),
    ],
)
def test_the_log_is_a_form_or_a_path_with_a_slash(text: str, form: LogForm, path: str | None) -> None:
    settings = Settings.from_env({"MEGACPP_OVERLAYS_LOG": text}, IDS)

    assert (settings.log, settings.log_path) == (form, path)


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"RANK": "7", "SLURM_PROCID": "3"}, 7),
        ({"SLURM_PROCID": "3"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"RANK": "-1"}, 0),
        ({"RANK": "none"}, 0),
    ],
)
def test_the_rank_comes_from_the_launcher(env: dict[str, str], rank: int) -> None:
    assert Settings.from_env(env, IDS).rank == rank


def test_plugins_are_a_list_of_names() -> None:
    assert plugin_names({"MEGACPP_OVERLAYS_PLUGINS": "ours, theirs,"}) == ("ours", "theirs")
    assert plugin_names({}) == ()


# Overlays that were retired


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`old-fix` was retired."""
    entry = retired.Retired("old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (), ())
    monkeypatch.setattr(retired, "read", lambda: (entry,))


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("value", ["off", "auto"])
def test_a_variable_of_a_retired_overlay_is_known_and_says_that_it_can_go(value: str) -> None:
    settings = Settings.from_env({"MEGACPP_OVERLAY_OLD_FIX": value}, IDS)

    assert settings.disabled == frozenset()
    assert settings.outlived == (
        "old-fix was retired on 2026-11-21, with made-up 2.0: MEGACPP_OVERLAY_OLD_FIX does nothing and can go",
    )


@pytest.mark.usefixtures("gone")
def test_the_list_may_name_a_retired_overlay_beside_others() -> None:
    settings = Settings.from_env({"MEGACPP_OVERLAYS_DISABLE": "old-fix,scale-pad"}, IDS)

    assert settings.disabled == {"scale-pad"}
    assert settings.outlived == (
        "old-fix was retired on 2026-11-21, with made-up 2.0: it can go from MEGACPP_OVERLAYS_DISABLE",
    )


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"MEGACPP_OVERLAY_OLD_FIX": "of"}, "MEGACPP_OVERLAY_OLD_FIX=of is not known; did you mean off"),
        ({"MEGACPP_OVERLAY_OLD_FX": "off"}, "MEGACPP_OVERLAY_OLD_FX is no setting"),
        ({"MEGACPP_OVERLAYS_DISABLE": "old-fx"}, "names old-fx, which is no overlay"),
        ({"MEGACPP_OVERLAY_OLD_FIX": "off", "MEGACPP_OVERLAY_SCALE_PADD": "off"}, "MEGACPP_OVERLAY_SCALE_PADD is no"),
    ],
)
def test_a_typo_is_refused_all_the_same(env: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.from_env(env, IDS)


@given(st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=12))
def test_no_word_outside_the_known_ones_ever_passes_as_a_mode(word: str) -> None:
    if word.lower() in {mode.value for mode in Mode}:
        return

    with pytest.raises(SettingsError, match=word):
        Settings.from_env({"MEGACPP_OVERLAYS": word}, IDS)


@given(st.text(string.ascii_uppercase + "_", max_size=12))
def test_no_variable_that_looks_like_ours_is_ignored(suffix: str) -> None:
    name = f"MEGACPP_OVERLAY_{suffix}"
    if name in {"MEGACPP_OVERLAY_SCALE_PAD", "MEGACPP_OVERLAY_FLCE_NONE"}:
        return

    with pytest.raises(SettingsError, match=name):
        Settings.from_env({name: "off"}, IDS)
