"""Edits that break the repair of `liger-flce-none-backward` in liger-kernel 0.8.5."""

from __future__ import annotations

from edited_code import Case, appended, of_release

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature

REPAIR = Case(
    feature,
    feature.MODULE,
    edits={
        "first token alone": ("* token_grad_output[start_idx:end_idx].unsqueeze(-1).to(", "* token_grad_output[0].to("),
        "product discarded": (
            "grad_logits_chunk = grad_logits_chunk * token_grad_output",
            "_ = grad_logits_chunk * token_grad_output",
        ),
        "undone behind it": (
            "        if input_requires_grad:\n",
            "        grad_logits_chunk = _unscaled\n        if input_requires_grad:\n",
        ),
        "never deferred": ('ctx.defer_grads = reduction == "none" and needs_grad', "ctx.defer_grads = False"),
        "deferred for another reduction": (
            'ctx.defer_grads = reduction == "none"',
            'ctx.defer_grads = reduction == "mean"',
        ),
        "under a flag": (
            "if token_grad_output is not None:",
            'if __import__("os").environ.get("LIGER_REPAIRED") and token_grad_output is not None:',
        ),
        "in dead code": ("if token_grad_output is not None:", "if False:"),
        "handed over in dead code": (
            "        if ctx.defer_grads:\n            # reduction",
            "        if False:\n            # reduction",
        ),
        "scaled again": (
            "                **ctx.fwd_kwargs,\n            )\n",
            "                **ctx.fwd_kwargs,\n            )\n            grad_weight *= grad_output[0]\n",
        ),
        "class rebound": appended(f"{feature.FUNCTION} = type('{feature.FUNCTION}', ({feature.FUNCTION},), older)"),
        "method rebound through globals": appended(f"globals()['{feature.FUNCTION}'].backward = older"),
        "class decorated": (f"class {feature.FUNCTION}(", f"@patched\nclass {feature.FUNCTION}("),
        "backward decorated": ("    @amp_custom_bwd\n", "    @amp_custom_bwd\n    @detached\n"),
        "isinstance shadowed": appended("def isinstance(*_):\n    return False"),
        "products imported from elsewhere": (
            "from liger_kernel.backends import dispatch",
            "from vendor import dispatch",
        ),
        "a call at import": appended("patch_flce()"),
    },
    tree=of_release("liger_kernel-0.8.5"),
)
