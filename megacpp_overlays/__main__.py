"""`python -m megacpp_overlays`: the same as the console script `megacpp-overlays`."""

import sys

from megacpp_overlays.cli import main

sys.exit(main())
