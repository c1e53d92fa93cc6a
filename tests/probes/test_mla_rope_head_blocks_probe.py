"""The probe of the blocks of heads that rotary kernels of MLA are tuned over: the same meaning, and another."""

from __future__ import annotations

from edited_code import released
from probing import Texts, ask

from megacpp_overlays.feature_probes.mla_rope_head_blocks import TARGET, probe
from megacpp_overlays.model import Verdict

MODULE = TARGET.module


def test_a_text_of_the_same_meaning_is_known_and_an_edited_one_is_not() -> None:
    text = released("megatron_core-0.19.2", MODULE)

    assert ask(probe, Texts({MODULE: f"# as it was\n{text}"})).verdict is Verdict.BROKEN
    for old, new in (('{"BLOCK_H": 128}', '{"BLOCK_H": 256}'), ("tl.program_id(axis=1)", "tl.program_id(axis=1) + 0")):
        assert old in text
        assert ask(probe, Texts({MODULE: text.replace(old, new, 1)})).verdict is Verdict.UNRECOGNISED


def test_a_missing_target_is_absent() -> None:
    assert ask(probe, Texts({MODULE: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({MODULE: "def fused_apply_mla_rope_for_q(t): return t"})).verdict is Verdict.UNRECOGNISED
