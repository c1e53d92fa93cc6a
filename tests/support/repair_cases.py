"""Repairs that releases have, each with edits that leave or bring back the defect, and texts of releases with an edit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from installed import tree_of
from places import WHEELS
from probing import ParsedOnce, Texts, ask, parsed_once

from megacpp_overlays.feature_probes import (
    expert_bias_padding_mask,
    liger_flce_none_backward,
    mamba3_mimo_reduce_layout,
    quant_recipe_stale_weights,
    tilelang_bulk_copy_rank,
    tilelang_grouped_reduce,
    tilelang_zero_extent_iterator,
    triton_register_operands,
)
from megacpp_overlays.model import Finding
from megacpp_overlays.source.trees import SourceTree

Edit = tuple[str, str] | tuple[str, str, str] | Callable[[str], str]
"""Old and new text of the target, or of the module that is named first; or what is done to the text of the target.

A file that is no module is named `package:path`.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Upstream code, and edits of it."""

    feature: ModuleType
    target: str
    texts: Callable[[], Mapping[str, str | None]]
    edits: Mapping[str, Edit]
    probe: str = "probe"
    tree: Callable[[], SourceTree | None] = lambda: None

    @property
    def overlay(self) -> str:
        """Return the id of the overlay that the probe is for."""
        return self.feature.__name__.rpartition(".")[2].replace("_", "-")

    def ask(self, texts: Mapping[str, str | None]) -> Finding:
        return ask(getattr(self.feature, self.probe), Texts(texts, self.tree()))

    def edited(self, edit: Edit) -> dict[str, str | None]:
        name, *changed = edit if isinstance(edit, tuple) and len(edit) == 3 else (self.target, *_parts(edit))
        before = self._text(name)
        if callable(changed[0]):
            after = changed[0](before)
        else:
            old, new = changed
            assert old in before
            after = before.replace(old, new, 1)
        assert after != before
        return {**self.texts(), name: after}

    def _text(self, name: str) -> str:
        tree = Texts(self.texts(), self.tree())
        package, _, path = name.partition(":")
        found = tree.shipped(package, path) if path else tree.module(name)
        assert found is not None
        return found.text


def _parts(edit: Edit) -> tuple[Any, ...]:
    return edit if isinstance(edit, tuple) else (edit,)


def appended(code: str) -> Callable[[str], str]:
    """Return an edit that adds code at the end."""
    return lambda text: f"{text}\n\n{code}\n"


REFRESHED = "            self.optimizer.update_fp32_param_by_new_param()\n            return\n"


ATTACHED_GLOBALLY = (
    "        probs = self.attach_and_log_load_balancing_loss(\n            probs,\n            global_aux_loss_coeff,\n"
)


COUNTED = "        self.step(increment=num_steps)\n"


@functools.cache
def released(prefix: str, module: str) -> str:
    source = archive(prefix).module(module)
    assert source is not None
    return source.text


@functools.cache
def archive(prefix: str) -> ParsedOnce:
    found = sorted(WHEELS.glob(f"{prefix}*"))
    if not found:
        pytest.skip(f"no {prefix} in {WHEELS}")
    return parsed_once(found[0])


def edited_release(module: str, old: str, new: str, *, release: str = "0.19.2") -> Texts:
    """Return a release of megatron-core in which the first place with a text of one module was changed."""
    tree = archive(f"megatron_core-{release}")
    source = tree.module(module)
    assert source is not None
    assert old in source.text
    return Texts({module: source.text.replace(old, new, 1)}, tree)


def masking_tokens() -> str:
    """Let the router of the newest release lay the mask of tokens over tokens."""
    text = released("megatron_core-0.19.2", expert_bias_padding_mask.TARGET.module)
    old = "routing_map = routing_map & (~padding_mask)\n"
    assert old in text
    return text.replace(old, "routing_map = routing_map & (~padding_mask).unsqueeze(-1)\n", 1)


DISPATCHER = """
import torch
from transformer_engine.pytorch import QuantizedTensor
from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA

def _all_bfloat16(*tensors):
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)

def fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels):
    if SparseMLA is None:
        return None
    if not _all_bfloat16(query, key):
        return None
    q = query.permute(1, 0, 2, 3).contiguous()
    kv = key.permute(1, 0, 2, 3).contiguous()
    out, _ = SparseMLA.apply(q, kv, topk_indices.unsqueeze(2), softmax_scale)
    return out.permute(1, 0, 2, 3).contiguous()
"""
START = "    if SparseMLA is None:\n        return None\n"
PRUNED = """
def keep(configs, named_args, **kwargs):
    major, _ = torch.cuda.get_device_capability(named_args["Q"].device)
    if major in (10, 12):
        return [config for config in configs if config.num_stages == 1]
    return configs


@triton.autotune(
    prune_configs_by={"early_config_prune": keep},"""


def switched_on(lane: str, module: str = tilelang_bulk_copy_rank.TARGET.module) -> str:
    """Return kernels of Mamba-3 in a lane, with TMA lowering on."""
    source = tree_of(lane).module(module)
    assert source is not None
    return source.text.replace("TL_DISABLE_TMA_LOWER: True", "TL_DISABLE_TMA_LOWER: False")


_LIGER = liger_flce_none_backward.FUNCTION
COPY, OLD_COPY, UTILS = "src/cuda/op/copy.cc", "src/op/copy.cc", "src/layout/utils.cc"
REDUCE, OLD_REDUCE = "src/backend/common/op/reduce.h", "src/op/reduce.cc"
"""C++ that TileLang ships: since 0.1.11 and up to 0.1.9; since 0.1.10 and up to 0.1.9."""
_COVERED = "analyzer->CanProve(expected_lower_factor > mark->extent)"

CASES = {
    "told of recipes": Case(
        quant_recipe_stale_weights,
        quant_recipe_stale_weights.TARGET.module,
        lambda: {quant_recipe_stale_weights.TARGET.module: released("megatron_core-0.19.2", quant_recipe_stale_weights.TARGET.module)},
        {
            "forgotten": ("            or getattr(self.config, 'quant_recipe', None) is not None\n", ""),
            "of another name": ("getattr(self.config, 'quant_recipe', None)", "getattr(self.config, 'recipe', None)"),
            "with both": ("            or getattr(self.config, 'quant_recipe', None) is not None\n", "            and getattr(self.config, 'quant_recipe', None) is not None\n"),
            "that it does not": ("                m.is_first_microbatch = True\n", "                m.is_first_microbatch = False\n"),
            "to the first": ("            for m in self.modules_with_is_first_microbatch:\n", "            for m in self.modules_with_is_first_microbatch[:1]:\n"),
            "to its own": ("                for m in self.modules():\n                    if hasattr(m, \"is_first_microbatch\"):\n", "                for m in self.children():\n                    if hasattr(m, \"is_first_microbatch\"):\n"),
            "decorated": ("    def set_is_first_microbatch(", "    @of_old\n    def set_is_first_microbatch("),
            "set from outside": appended("MegatronModule.set_is_first_microbatch = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "masked counts": Case(
        expert_bias_padding_mask,
        expert_bias_padding_mask.TARGET.module,
        lambda: {expert_bias_padding_mask.TARGET.module: masking_tokens()},
        {
            "over experts": ("(~padding_mask).unsqueeze(-1)", "(~padding_mask).unsqueeze(0)"),
            "padding alone": ("(~padding_mask).unsqueeze(-1)", "padding_mask.unsqueeze(-1)"),
            "not kept": ("                    routing_map = routing_map & (~padding_mask)", "                    masked = routing_map & (~padding_mask)"),
            "or": ("routing_map & (~padding_mask)", "routing_map | (~padding_mask)"),
            "under a flag": ("                if padding_mask is not None:\n                    routing_map = ", "                if padding_mask is not None and FLAG:\n                    routing_map = "),
            "counted before": ("                if padding_mask is not None:\n                    routing_map = ", "                self.local_tokens_per_expert += routing_map.sum(dim=0)\n                if padding_mask is not None:\n                    routing_map = "),
            "not told": ("self._apply_expert_bias(routing_map, padding_mask=padding_mask)", "self._apply_expert_bias(routing_map)"),
            "told in another order": ("            padding_mask = padding_mask.reshape(-1)\n", "            padding_mask = padding_mask.transpose(0, 1).reshape(-1)\n"),
            "decorated": ("    @jit_fuser\n    def _apply_expert_bias(", "    @of_old\n    def _apply_expert_bias("),
            "set from outside": appended("TopKRouter._apply_expert_bias = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "liger": Case(
        liger_flce_none_backward,
        liger_flce_none_backward.MODULE,
        lambda: {liger_flce_none_backward.MODULE: released("liger_kernel-0.8.5", liger_flce_none_backward.MODULE)},
        {
            "first token alone": ("* token_grad_output[start_idx:end_idx].unsqueeze(-1).to(", "* token_grad_output[0].to("),
            "product discarded": ("grad_logits_chunk = grad_logits_chunk * token_grad_output", "_ = grad_logits_chunk * token_grad_output"),
            "undone behind it": ("        if input_requires_grad:\n", "        grad_logits_chunk = _unscaled\n        if input_requires_grad:\n"),
            "never deferred": ('ctx.defer_grads = reduction == "none" and needs_grad', "ctx.defer_grads = False"),
            "deferred for another reduction": ('ctx.defer_grads = reduction == "none"', 'ctx.defer_grads = reduction == "mean"'),
            "under a flag": ("if token_grad_output is not None:", 'if __import__("os").environ.get("LIGER_REPAIRED") and token_grad_output is not None:'),
            "in dead code": ("if token_grad_output is not None:", "if False:"),
            "handed over in dead code": ("        if ctx.defer_grads:\n            # reduction", "        if False:\n            # reduction"),
            "scaled again": ("                **ctx.fwd_kwargs,\n            )\n", "                **ctx.fwd_kwargs,\n            )\n            grad_weight *= grad_output[0]\n"),
            "class rebound": appended(f"{_LIGER} = type('{_LIGER}', ({_LIGER},), older)"),
            "method rebound through globals": appended(f"globals()['{_LIGER}'].backward = older"),
            "class decorated": (f"class {_LIGER}(", f"@patched\nclass {_LIGER}("),
            "backward decorated": ("    @amp_custom_bwd\n", "    @amp_custom_bwd\n    @detached\n"),
            "isinstance shadowed": appended("def isinstance(*_):\n    return False"),
            "products imported from elsewhere": ("from liger_kernel.backends import dispatch", "from vendor import dispatch"),
            "a call at import": appended("patch_flce()"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
    ),
    "bulk copy": Case(
        tilelang_bulk_copy_rank,
        f"tilelang:{COPY}",
        lambda: {tilelang_bulk_copy_rank.TARGET.module: switched_on("edge")},
        {
            "two axes again": ("  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n", '  ICHECK(shared_tensor->shape.size() == 2) << "Cannot detect TMA layout.";\n  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n'),
            "no way back": ("    return fallback_to_normal(bulk_analysis.reason);\n", "    LOG(FATAL) << bulk_analysis.reason;\n"),
            "always refused": ("  if (!bulk_analysis.plan.has_value()) {\n    DLOG(WARNING) << \"TMA bulk copy", "  if (true) {\n    DLOG(WARNING) << \"TMA bulk copy"),
            "the other tensor": ("  shared_tensor = plan.shared_tensor;\n", ""),
            "not compiled": ("Stmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n", "#if 0\n#endif\nStmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n"),
            "defined away": ("Stmt Copy::LowerBulk(", "#define has_value() has_no_value()\nStmt Copy::LowerBulk("),
            "another plan": ("  TMADesc desc = plan.desc;\n", "  TMADesc desc = FlatDesc(plan.desc);\n"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
    ),
    "zero extent": Case(
        tilelang_zero_extent_iterator,
        f"tilelang:{UTILS}",
        dict,
        {
            "equality alone": (f"      analyzer->CanProveEqual(expected_lower_factor, mark->extent) ||\n      {_COVERED};", "      analyzer->CanProveEqual(expected_lower_factor, mark->extent);"),
            "in a comment": (_COVERED, f"false /* {_COVERED} */"),
            "and false": (_COVERED, f"({_COVERED} && false)"),
            "in a text": (_COVERED, f'Said("{_COVERED}")'),
            "under #if 0": (_COVERED, f"\n#if 0\n{_COVERED}\n#else\nfalse\n#endif\n"),
            "defined away": ("#include", "#define CanProve(x) false\n#include"),
            "asked and not used": ("  if (!covers_full_iter) {", "  if (true) {"),
            "the other way round": (_COVERED, f"!{_COVERED}"),
            "added by the caller": ("    results.insert(results.end(), complement_splits.rbegin(),", "    results.push_back(IterSplitExpr(mark, 1, 0, 1));\n    results.insert(results.end(), complement_splits.rbegin(),"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
    ),
    "grouped sums": Case(
        tilelang_grouped_reduce,
        f"tilelang:{REDUCE}",
        dict,
        {
            "never asked": ("  CheckThreadOwnedStepsProjectable(index_expr, reduce_var, thread_steps,\n                                   &proof_analyzer);\n", ""),
            "asked of nothing": ("  if (steps.empty()) {\n    return;", "  if (true) {\n    return;"),
            "a warning": ("  ICHECK(analyzer->CanProveEqual(projected_index, simplified_index))\n", "  if (!analyzer->CanProveEqual(projected_index, simplified_index))\n    LOG(WARNING)\n"),
            "compared with itself": ("CanProveEqual(projected_index, simplified_index)", "CanProveEqual(simplified_index, simplified_index)"),
            "not projected": ("        FloorMod(FloorDiv(reduce_var, lower), extent) * lower;", "        0;"),
            "counted twice": ("        remaining_thread_owned_factor /= factor;\n", ""),
            "under #if 0": ("  ICHECK(analyzer->CanProveEqual(projected_index", "#if 0\n#endif\n  ICHECK(analyzer->CanProveEqual(projected_index"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
    ),
    "register operands": Case(
        triton_register_operands,
        triton_register_operands.TARGET.module,
        dict,
        {
            "without waits": ("            print(ret)\n        return ret", "            print(ret)\n        return without_waits(ret)"),
            "an older compiler": ("from triton._C.libtriton import", "from triton._C.older.libtriton import"),
            "the older assembler": ("    return knobs.nvidia.ptxas_blackwell", "    return knobs.nvidia.ptxas"),
            "registers of the assembler": ("reg_alloc = ['--regAllocOptLevel=2']", "reg_alloc = []"),
            "pipelined again": ("            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)", "            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)\n            ours.passes.without_waits(pm)"),
            "assembled elsewhere": appended("CUDABackend.make_cubin = make_cubin_of_3_6"),
            "a method on top": ("class CUDABackend(BaseBackend):", "class CUDABackend(OlderBackend):"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
    ),
    "sums of a layout": Case(
        mamba3_mimo_reduce_layout,
        f"tilelang:{OLD_REDUCE}",
        dict,
        {
            "refused at the start": ("  auto src_scope = this->src.scope();\n", '  ICHECK(this->dim == 0) << "cannot lower";\n  auto src_scope = this->src.scope();\n'),
            "refused for some threads": ("        int reducing_threads = (*extent) * (*scale);\n", "        int reducing_threads = (*extent) * (*scale);\n        ICHECK(reducing_threads <= 32);\n"),
            "workspace left out": ("        if (reducing_threads > 32) {", "        if (false) {"),
            "not all threads": ("        if (*extent == 1)\n          continue;\n", "        continue;\n"),
            "of one thread": ("int reducing_threads = (*extent) * (*scale);", "int reducing_threads = *scale;"),
            "the words of the check": ("  auto src_scope = this->src.scope();\n", '  LOG(FATAL) << "ReduceOp cannot lower a layout where a source index depends on a";\n  auto src_scope = this->src.scope();\n'),
            "another scope": ('src_scope == "local.fragment"', 'src_scope == "shared"'),
        },
        tree=lambda: parsed_once(tree_of("mamba3-pinned").root),
    ),
}  # fmt: skip
