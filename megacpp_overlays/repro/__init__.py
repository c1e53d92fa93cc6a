"""What a pack's `reproduce.py` is written with; the command `megacpp-overlays repro` runs it."""

from megacpp_overlays.repro.case import Behaviour, Blocked, Case, TargetAbsent

__all__ = ["Behaviour", "Blocked", "Case", "TargetAbsent"]
