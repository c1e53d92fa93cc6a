"""Edits that break the repair of `quant-recipe-stale-weights` in megatron-core 0.19.2."""

from __future__ import annotations

from edited_code import Case, appended, of_release

from megacpp_overlays.feature_probes import quant_recipe_stale_weights as feature

REPAIR = Case(
    feature,
    feature.TARGET.module,
    edits={
        "forgotten": ("            or getattr(self.config, 'quant_recipe', None) is not None\n", ""),
        "of another name": ("getattr(self.config, 'quant_recipe', None)", "getattr(self.config, 'recipe', None)"),
        "with both": (
            "            or getattr(self.config, 'quant_recipe', None) is not None\n",
            "            and getattr(self.config, 'quant_recipe', None) is not None\n",
        ),
        "that it does not": (
            "                m.is_first_microbatch = True\n",
            "                m.is_first_microbatch = False\n",
        ),
        "to the first": (
            "            for m in self.modules_with_is_first_microbatch:\n",
            "            for m in self.modules_with_is_first_microbatch[:1]:\n",
        ),
        "to its own": (
            '                for m in self.modules():\n                    if hasattr(m, "is_first_microbatch"):\n',
            '                for m in self.children():\n                    if hasattr(m, "is_first_microbatch"):\n',
        ),
        "decorated": ("    def set_is_first_microbatch(", "    @of_old\n    def set_is_first_microbatch("),
        "set from outside": appended("MegatronModule.set_is_first_microbatch = of_old"),
    },
    tree=of_release("megatron_core-0.19.2"),
)
