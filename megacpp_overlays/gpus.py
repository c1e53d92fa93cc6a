"""Former name of `megacpp_overlays.runtime.gpus`, which reproducers with kept receipts import."""

from megacpp_overlays.runtime.gpus import Capability, capabilities

__all__ = ["Capability", "capabilities"]
