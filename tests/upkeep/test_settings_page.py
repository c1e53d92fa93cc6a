"""The reference page of the settings: it has every fact of the registry about each setting."""

from __future__ import annotations

import pytest

from megacpp_overlays.loader import registry
from megacpp_overlays.upkeep.settings_page import settings_page
from megacpp_overlays.variables import SETTINGS, Setting

OVERLAYS = registry.load()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_has_a_row_that_leads_to_a_section_with_all_there_is_to_say(setting: Setting) -> None:
    page = settings_page(OVERLAYS)

    (row,) = [line for line in page.splitlines() if line.startswith(f"| [`{setting.name}`](#")]
    assert f"(#{setting.name.lower().replace('<id>', 'id')})" in row
    section = page.partition(f"## `{setting.name}`\n")[2].partition("\n## ")[0]
    for said in (setting.meaning, setting.default, setting.form, setting.ranks, *setting.values):
        assert said in section


def test_every_overlay_and_gate_is_listed_once_with_its_variable() -> None:
    page = settings_page(OVERLAYS)

    for overlay in {each.id: each for each in OVERLAYS}.values():
        state = "off" if overlay.off_by_default else "on"
        assert page.count(f"| `{overlay.variable}` | {state} | {overlay.title} |\n") == 1


def test_the_note_is_below_the_title() -> None:
    assert settings_page(OVERLAYS, "Generated.").startswith("# Settings\n\nGenerated.\n\nAll settings are")
