"""The version of this package, also read by the build."""

VERSION = "0.2.0"
