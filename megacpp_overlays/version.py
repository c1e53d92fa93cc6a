"""The version of this package, also read by the build, and the Python that it is tested on."""

VERSION = "0.2.0"
NEWEST_PYTHON = (3, 13)
"""The newest minor version of Python that tests run on, as the classifiers of pyproject.toml say.

A newer one is not refused: if a probe does not recognise the syntax tree of its parser, it says so, and nothing is installed.
"""
