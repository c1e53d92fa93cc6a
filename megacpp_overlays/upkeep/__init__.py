"""Maintenance of the lanes between runs: releases, upgrades, drift, upstream threads, retirement.

None of this is imported by a launcher. What needs more than the run-time dependencies is in the extra `upkeep`.
"""
