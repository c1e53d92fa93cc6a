"""The loss mask that Megatron's GPT dataset caches, in which it then masks the padding of a sample.

Only masks of ones are cached: where the loss of ends of documents is masked, nothing is. The seam relies on that, on the cache being filled and
read in one place each, and on padding being masked right after it.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6981
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import plain_class, plain_function, words
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import SourceTree

CLASS = "GPTDataset"
METHOD, MASKS = f"{CLASS}.__getitem__", "_get_ltor_masks_and_position_ids"
TARGET = Target(distribution="megatron-core", module="megatron.core.datasets.gpt_dataset", symbol=METHOD)
FIRST, EVERY = "first-in-cache", "every-in-cache"

_CACHE = Pattern("self.cached_loss_mask")
_GET = Pattern("""
def __getitem__(self, idx):
    $$_
    if not self.masks_and_position_ids_are_cacheable or not self.masks_and_position_ids_are_cached:
        $_, $loss, $_ = _get_ltor_masks_and_position_ids($$_)
        if self.masks_and_position_ids_are_cacheable:
            self.cached_attention_mask = $_
            self.cached_loss_mask = $loss
            self.cached_position_ids = $_
            self.masks_and_position_ids_are_cached = True
    else:
        $_ = self.cached_attention_mask
        $loss = $read
        $_ = self.cached_position_ids
    $loss[$labels == self._pad_token_id] = 0.0
    $$_
""")
_READ = {"self.cached_loss_mask": EVERY, "self.cached_loss_mask.clone()": FIRST}
_CACHEABLE = Pattern("self.masks_and_position_ids_are_cacheable = not any([$$_, self.config.eod_mask_loss])")
_ONES = Pattern("""
def _get_ltor_masks_and_position_ids($$_, eod_mask_loss, create_attention_mask):
    $$_
    $loss = torch.ones($$_)
    if eod_mask_loss:
        $loss[$_] = 0.0
    $$_
    return $_, $loss, $_
""")


def probe(tree: SourceTree) -> Finding:
    """Return whether padding is masked in the cached mask: that of the first sample, or of every one."""
    source = tree.module(TARGET.module)
    cls = plain_class(source, CLASS) if source else None
    if source is None or cls is None:
        return absent(f"there is no {TARGET.module}.{CLASS}", source)
    method, made = (plain_function(source, f"{CLASS}.{each}") for each in ("__getitem__", "__init__"))
    if method is None or made is None:
        raise unknown(source, cls, f"{CLASS} is made or asked otherwise")
    if not any(word.startswith("cached") or word.endswith("cached") for word in words(cls)):
        return absent(f"{CLASS} caches no masks", source)
    if "_pad_token_id" not in words(cls):
        return absent(f"{CLASS} masks no padding", source)
    if not any(_CACHEABLE.find(made)) or not _ONES.match(plain_function(source, MASKS)):
        raise unknown(source, cls, "masks that are cached may be others than of ones")
    found = _GET.match(method)
    shape = _READ.get(found.text("read")) if found else None
    if found is None or shape is None or sum(1 for _ in _CACHE.find(method)) != len(_READ):
        raise unknown(source, method, "the cached loss mask is filled, read or masked otherwise")
    seen = {
        FIRST: "the sample that fills the cache masks its padding in it",
        EVERY: "each sample masks its padding in the cache",
    }
    return broken(shape, at(source, found["read"], seen[shape]))
