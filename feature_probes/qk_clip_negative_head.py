"""Factors by which Megatron's attention clips query and key weights, which are negative where the largest logit of a head is.

The seam raises largest logits to half the threshold, which is right where they are compared with it, divide it, and are then forgotten: factors of heads
below it are one. Code before that may only raise.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7517
"""

from __future__ import annotations

import ast

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import plain_class, plain_function
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import SourceTree


def _target(module: str, cls: str) -> Target:
    return Target(distribution="megatron-core", module=f"megatron.core.transformer.{module}", symbol=f"{cls}.clip_qk")


GROUPED, LATENT = _target("attention", "SelfAttention"), _target("multi_latent_attention", "MLASelfAttention")
DIVIDED = "divided-by-any-logit"

_CLIP = Pattern("""
def clip_qk(self):
    $$first
    if torch.any($logits > self.config.qk_clip_threshold):
        $shape
        self.qk_clip_balancing_eta = torch.clamp(self.config.qk_clip_threshold / $logits, max=1.0).view($$_)
        assert torch.all(self.qk_clip_balancing_eta <= 1.0)
        $$_
    self.core_attention.current_max_attn_logits = None
""")
_OF_HEADS = Pattern("self.core_attention.current_max_attn_logits")
_OF_GROUPS = Pattern("""
$logits = torch.max(self.core_attention.current_max_attn_logits.view(self.num_query_groups_per_partition, -1), dim=1).values
""")


def _probe(target: Target, tree: SourceTree) -> Finding:
    """Return whether factors of an attention may be negative."""
    source = tree.module(target.module)
    cls, _, _ = target.symbol.partition(".")
    if source is None or plain_class(source, cls) is None:
        return absent(f"there is no {target.module}.{cls}", source)
    method = plain_function(source, target.symbol)
    if method is None:
        return absent(f"{cls} clips no weights", source)
    found = _CLIP.match(method)
    if found is None:
        raise unknown(source, method, "clip_qk has other factors")
    grouped = [each for each in map(_OF_GROUPS.match, found.many("first")) if each]
    refusing = [found["shape"], *(each for each in found.many("first") if not _OF_GROUPS.match(each))]
    of_heads = _OF_HEADS.match(found["logits"]) is not None
    of_groups = len(grouped) == 1 and grouped[0].text("logits") == found.text("logits")
    if of_heads is of_groups or not all(map(_refuses, refusing)):
        raise unknown(source, method, "clip_qk does more than compare largest logits with the threshold")
    return broken(
        DIVIDED, at(source, found["logits"], "the threshold is divided by largest logits, negative ones, too")
    )


def _refuses(node: ast.AST) -> bool:
    """Return whether a statement does nothing, or ends in an error."""
    match node:
        case ast.Assert() | ast.If(body=[ast.Raise()], orelse=[]):
            return True
    return False


def probe(tree: SourceTree) -> Finding:
    """Return whether factors of grouped queries may be negative."""
    return _probe(GROUPED, tree)


def probe_latent(tree: SourceTree) -> Finding:
    """Return whether factors of latent attention may be negative."""
    return _probe(LATENT, tree)
