"""A standing adversary: mutants of the texts that probes read, over every release and tree that tests know, and the wrong findings.

`make adversary` runs some 30,000 of them; `tests/probes/test_adversary.py` runs a few hundred with each `make test`.
"""
