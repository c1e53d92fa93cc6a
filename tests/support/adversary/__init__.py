"""A standing adversary: mutants of what probes read, over every release and tree that tests know, and what must not be said of them.

`make adversary` runs some 30,000 of them; `tests/probes/test_adversary.py` runs a few hundred with each `make test`.
"""
