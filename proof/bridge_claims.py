"""Claims about megatron-bridge's pretrain function under overlays, judged by the rules for Megatron-LM's launcher."""

from __future__ import annotations

from claims import Claim
from megatron_claims import as_stock, off, trains, used
from megatron_launches import Layout

LOSSES = {
    Layout.ONE: "with overlays its losses are stock's but for rounding",
    Layout.DATA: "over two data-parallel ranks with Megatron's distributed optimizer, too, and both ranks decide alike",
    Layout.TENSOR: "over two tensor-parallel ranks with sequence parallelism, too, and both ranks decide alike",
}
CLAIMS = (
    Claim("bridge-trains", "megatron-bridge's pretrain, not edited, trains by `megacpp_overlays run`", trains),
    Claim("bridge-used", "overlays are used, and not only active; none is in conflict", used),
    Claim("bridge-off", "with MEGACPP_OVERLAYS=off it does what stock does", off),
    *(Claim(f"bridge-losses-{layout.name.lower()}", words, as_stock(layout).judge) for layout, words in LOSSES.items()),
)
