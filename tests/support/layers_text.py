"""Text of a made-up module with a decorated function, a helper, an import under another name, a constant and a class."""

LAYERS = '''
"""A module."""

import math
from package.helpers import half as a_half

SCALE = 2


def helper(x):
    return a_half(x) + math.floor(SCALE)


@functools.cache
def repaired(x, *, scale=SCALE):
    """Say what it does."""
    total = [helper(each) for each in x]
    return isinstance(total, list) and len(total)


class Base:
    pass


class Layer(Base):
    def __init__(self):
        self.positions = {}

    def forward(self, x):
        return repaired(x)

    def other(self):
        return 1
'''
