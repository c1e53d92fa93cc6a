"""Edits that break the repair of `expert-bias-padding-mask` in a router of megatron-core 0.19.2 with the repair of upstream's main branch."""

from __future__ import annotations

from edited_code import Case, appended, of_release, released

from megacpp_overlays.feature_probes import expert_bias_padding_mask as feature


def masking_tokens() -> str:
    """Let the router of the newest release lay the mask of tokens over tokens."""
    text = released("megatron_core-0.19.2", feature.TARGET.module)
    old = "routing_map = routing_map & (~padding_mask)\n"
    assert old in text
    return text.replace(old, "routing_map = routing_map & (~padding_mask).unsqueeze(-1)\n", 1)


REPAIR = Case(
    feature,
    feature.TARGET.module,
    texts=lambda: {feature.TARGET.module: masking_tokens()},
    edits={
        "over experts": ("(~padding_mask).unsqueeze(-1)", "(~padding_mask).unsqueeze(0)"),
        "padding alone": ("(~padding_mask).unsqueeze(-1)", "padding_mask.unsqueeze(-1)"),
        "not kept": (
            "                    routing_map = routing_map & (~padding_mask)",
            "                    masked = routing_map & (~padding_mask)",
        ),
        "or": ("routing_map & (~padding_mask)", "routing_map | (~padding_mask)"),
        "under a flag": (
            "                if padding_mask is not None:\n                    routing_map = ",
            "                if padding_mask is not None and FLAG:\n                    routing_map = ",
        ),
        "counted before": (
            "                if padding_mask is not None:\n                    routing_map = ",
            "                self.local_tokens_per_expert += routing_map.sum(dim=0)\n                if padding_mask is not None:\n                    routing_map = ",
        ),
        "not told": (
            "self._apply_expert_bias(routing_map, padding_mask=padding_mask)",
            "self._apply_expert_bias(routing_map)",
        ),
        "told in another order": (
            "            padding_mask = padding_mask.reshape(-1)\n",
            "            padding_mask = padding_mask.transpose(0, 1).reshape(-1)\n",
        ),
        "decorated": ("    @jit_fuser\n    def _apply_expert_bias(", "    @of_old\n    def _apply_expert_bias("),
        "set from outside": appended("TopKRouter._apply_expert_bias = of_old"),
    },
    tree=of_release("megatron_core-0.19.2"),
)
