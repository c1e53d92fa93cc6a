"""Maintenance of the lanes between runs: releases, upgrades, drift, upstream threads, retirement.

No launcher imports these modules. Dependencies beyond those of the run time are in the extra `upkeep`.
"""
