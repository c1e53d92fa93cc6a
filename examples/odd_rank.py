"""The demo with one rank that is not like the others: `verify_ranks` stops it before step 1.

    torchrun --nproc-per-node 2 examples/odd_rank.py

On the last rank one overlay is off, as after a job script that sets a variable on some hosts only.
"""

from __future__ import annotations

import os
import sys

if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    os.environ["MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"] = "off"

import train_tiny  # it imports megacpp_overlays first, which reads the variable

if __name__ == "__main__":
    sys.exit(train_tiny.main())
