"""The environment: every known word means one thing, every unknown word is refused with the nearest."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from megacpp_overlays import variables
from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader import registry, retired
from megacpp_overlays.loader.settings import LogForm, Mode, Settings, Switch, plugin_names
from megacpp_overlays.variables import SETTINGS, SWITCH, Setting

IDS = ("scale-pad", "flce-none")
MEMORY_MIB, LOGITS, MASKED, CHOICES, SMALL = (each.name for each in variables.OF_KERNELS)


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
        ({"MEGACPP_OVERLAYS": "1"}, "did you mean auto. known: auto, observe, off, strict"),
        ({"MEGACPP_OVERLAY_SCALEPAD": "off"}, "did you mean MEGACPP_OVERLAY_SCALE_PAD"),
        ({"MEGACPP_OVERLAY": "off"}, "did you mean MEGACPP_OVERLAYS"),
        ({"MEGACPP_OVERLAYS_DISABLED": "scale-pad"}, "did you mean MEGACPP_OVERLAYS_DISABLE"),
        ({"MEGACPP_OVERLAY_SCALE_PAD": "0"}, "did you mean off. known: auto, off, on$"),
        ({"MEGACPP_OVERLAY_SCALE": "off"}, "did you mean MEGACPP_OVERLAY_SCALE_PAD"),
        ({MEMORY_MIB: "five"}, f"{MEMORY_MIB}=five is not a whole number of MiB, 1 or more$"),
        ({"MEGACPP_LINEAR_CE_LOGIT": "keep"}, f"MEGACPP_LINEAR_CE_LOGIT is no setting .*; did you mean {LOGITS}"),
        ({LOGITS: "kepe"}, f"{LOGITS}=kepe is not known; did you mean keep. known: auto, keep, recompute$"),
        ({"MEGACPP_OVERLAYS_RECEIPTS": "a/b"}, "MEGACPP_OVERLAYS_RECEIPTS=a/b is not an absolute path"),
        ({"MEGACPP_OVERLAYS_CHILDREN": "1"}, "MEGACPP_OVERLAYS_CHILDREN=1 is not the name of an environment; unset it"),
        ({"MEGACPP_OVERLAYS_DISABLE": "flce-nune"}, "did you mean flce-none"),
        ({"MEGACPP_OVERLAYS_LOG": "stderrr"}, "did you mean stderr"),
        ({"MEGACPP_OVERLAYS_LOG": "audit"}, r"\./audit"),
        ({"MEGACPP_OVERLAYS_DISABLE": "scale-pad", "MEGACPP_OVERLAY_SCALE_PAD": "auto"}, "remove one of the two"),
    ],
)
def test_an_unknown_name_or_value_is_refused_with_the_nearest_known_one(env: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.from_env(env, IDS)


REAL_IDS = ("dsa-indexer-streaming", "hopper-flce-dispatch", "hybrid-linear-ce", "liger-flce-none-backward")


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ("LIGER_FLCE", "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"),
        ("LIGER_FLEC", "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"),
        ("FLCE", "MEGACPP_OVERLAY_HOPPER_FLCE_DISPATCH or MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"),
        ("HYBRID_LINEAR_FLCE", "MEGACPP_OVERLAY_HYBRID_LINEAR_CE"),
        ("H", "MEGACPP_OVERLAY_HOPPER_FLCE_DISPATCH or MEGACPP_OVERLAY_HYBRID_LINEAR_CE"),
    ],
)
def test_of_names_the_beginning_counts_before_the_spelling(given_: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"did you mean {meant}\?$"):
        Settings.from_env({f"MEGACPP_OVERLAY_{given_}": "off"}, REAL_IDS)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MEGACPP_OVERLAY_liger_flce_none_backward", "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"),
        ("MEGACPP_OVERLAY_liger-flce-none-backward", "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"),
        ("megacpp_overlay_hybrid_linear", "MEGACPP_OVERLAY_HYBRID_LINEAR_CE"),
        ("megacpp_overlays", "MEGACPP_OVERLAYS"),
        ("Megacpp_Linear_CE_Logits", LOGITS),
    ],
)
def test_a_name_in_another_case_is_refused_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is no setting of megacpp_overlays; did you mean {meant}\?"):
        Settings.from_env({name: "off"}, REAL_IDS)


@pytest.mark.parametrize(
    "env",
    [
        {"MEGACPP_OVERLAY_XYZ": "off"},
        {"MEGACPP_OVERLAY_mla": "off"},
        {"MEGACPP_OVERLAYS_DISABLE": "xyz"},
        {"MEGACPP_OVERLAYS_DISABLE": "FLCE"},
        {"MEGACPP_OVERLAYS_REQUIRE": "xyz=active"},
    ],
    ids=str,
)
def test_an_error_about_one_of_many_names_is_a_sentence_and_not_a_list(env: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_env(env, {overlay.id for overlay in registry.load()})

    assert len(str(refused.value)) < 250
    assert str(refused.value).count(" or ") <= 2


def test_a_name_that_is_near_to_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(
        SettingsError, match=r"MEGACPP_OVERLAY_XYZ is no setting of megacpp_overlays; none of the \d+ known names"
    ):
        Settings.from_env({"MEGACPP_OVERLAY_XYZ": "off"}, REAL_IDS)


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("MEGACPP_OVERLAYS", "auto", "off"),
        ("MEGACPP_OVERLAY_SCALE_PAD", "on", "off"),
        ("MEGACPP_OVERLAYS_LOG", "stderr", "logging"),
        (LOGITS, "keep", "recompute"),
        (MASKED, "skip", "compute"),
        (CHOICES, "check", "trust"),
        (SMALL, "overlay", "upstream"),
    ],
)
def test_yes_and_no_are_refused_with_the_word_that_is_meant(name: str, yes: str, no: str) -> None:
    meant = {**dict.fromkeys(["1", "true", "True", "yes"], yes), **dict.fromkeys(["0", "false", "FALSE", "no"], no)}

    for value, word in meant.items():
        with pytest.raises(SettingsError, match=rf"^{name}={value} is not known; did you mean {word}\? known: "):
            Settings.from_env({name: value}, IDS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("Scale-Pad", "did you mean scale-pad"),
        ("SCALE_PAD", "did you mean scale-pad"),
        ("MEGACPP_OVERLAY_SCALE_PAD", "did you mean scale-pad"),
        ("*", "did you mean MEGACPP_OVERLAYS=off"),
        ("all", "did you mean MEGACPP_OVERLAYS=off"),
        ("ALL", "did you mean MEGACPP_OVERLAYS=off"),
        ("1", "did you mean MEGACPP_OVERLAYS=off"),
    ],
)
def test_the_list_of_disabled_overlays_proposes_a_name_for_an_unknown_word(word: str, hint: str) -> None:
    expected = rf"^MEGACPP_OVERLAYS_DISABLE names {re.escape(word)}, which is no overlay; {hint}\? known: flce-none, "
    with pytest.raises(SettingsError, match=expected):
        Settings.from_env({"MEGACPP_OVERLAYS_DISABLE": word}, IDS)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("256MiB", "; did you mean 256"),
        ("512 mb", "; did you mean 512"),
        ("2GiB", "; did you mean 2048"),
        ("0256", "; did you mean 256"),
        *((text, "$") for text in ("0", "-1", "1.5", "1e3", "many", "\u0663", "9" * 4301)),
    ],
)
def test_an_amount_is_a_whole_number_in_one_spelling(text: str, meant: str) -> None:
    expected = f"^{MEMORY_MIB}={re.escape(text)} is not a whole number of MiB, 1 or more{meant}"
    with pytest.raises(SettingsError, match=expected):
        Settings.from_env({MEMORY_MIB: text}, IDS)


def test_settings_of_kernels_are_read_with_all_others() -> None:
    env = {MEMORY_MIB: " 512 ", LOGITS: "KEEP", MASKED: ""}

    expected = {MEMORY_MIB: "512", LOGITS: "keep", MASKED: "auto", CHOICES: "trust", SMALL: "upstream"}
    assert Settings.from_env(env, IDS).of_kernels == expected


@pytest.mark.parametrize(
    "name", ["MEGACPP_REQUIRE_BROWSER", "MEGACPP_RELEASES_CACHE", "MEGACPP", "MY_MEGACPP_OVERLAYS"]
)
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert Settings.from_env({name: "1"}, IDS) == Settings()


# The registry


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_says_all_that_its_reader_needs(setting: Setting) -> None:
    assert variables.is_ours(setting.name)
    assert setting.meaning.endswith(".")
    assert setting.values or setting.form
    assert setting.default in {*setting.values, ""} or setting.fits(setting.default)
    assert setting.ranks.startswith("Compared" if setting.compared_in else "Not compared: ")


def test_every_variable_that_this_project_reads_is_registered_or_said_to_be_none() -> None:
    """`MEGACPP_` names in the package and in its tools; tests make up names of their own."""
    files = [path for folder in ("megacpp_overlays", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in {".py", ".sh"}]
    found = {name for text in texts for name in re.findall(r"\bMEGACPP_[A-Z0-9_]*[A-Z0-9]\b", text)}

    exempt = set(re.findall(r"`(MEGACPP_[A-Z_]+)`", str(variables.__doc__)))
    switches = {name for name in found if name.startswith(SWITCH.name.partition("<")[0])}
    assert found - switches - set(variables.PREFIXES) <= {each.name for each in SETTINGS} | exempt
    assert not any(map(variables.is_ours, exempt))


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
    entry = retired.RetiredOverlay("old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (), ())
    monkeypatch.setattr(retired, "read", lambda: (entry,))


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("value", ["off", "auto"])
def test_a_variable_of_a_retired_overlay_is_known_and_says_that_it_can_go(value: str) -> None:
    settings = Settings.from_env({"MEGACPP_OVERLAY_OLD_FIX": value}, IDS)

    assert settings.disabled == frozenset()
    assert settings.obsolete_variables == (
        "old-fix was retired on 2026-11-21, with made-up 2.0: MEGACPP_OVERLAY_OLD_FIX does nothing and can go",
    )


@pytest.mark.usefixtures("gone")
def test_the_list_may_name_a_retired_overlay_among_others() -> None:
    settings = Settings.from_env({"MEGACPP_OVERLAYS_DISABLE": "old-fix,scale-pad"}, IDS)

    assert settings.disabled == {"scale-pad"}
    assert settings.obsolete_variables == (
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


@given(st.sampled_from(["MEGACPP_OVERLAY_", "MEGACPP_LINEAR_CE_"]), st.text(string.ascii_uppercase + "_", max_size=12))
def test_no_variable_that_looks_like_ours_is_ignored(prefix: str, suffix: str) -> None:
    name = f"{prefix}{suffix}"
    if name in {"MEGACPP_OVERLAY_SCALE_PAD", "MEGACPP_OVERLAY_FLCE_NONE", MEMORY_MIB, LOGITS, MASKED, CHOICES, SMALL}:
        return

    with pytest.raises(SettingsError, match=name):
        Settings.from_env({name: "off"}, IDS)
