"""Stand-in for `ops/sparse_mla.py` on a host without TileLang: same names, signatures and behaviour, none of its code."""

raise ImportError("the kernels need TileLang")
