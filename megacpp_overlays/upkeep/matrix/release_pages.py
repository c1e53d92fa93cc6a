"""Addresses of upstream's release pages: the page of a tag, for the tags that were seen.

Not every release on an index has a tag, and not every tag is named after its release alone. So no address is guessed: a
release that is not listed here has no link.
"""

from __future__ import annotations

_SEEN = {
    "megatron-core": (
        "NVIDIA/Megatron-LM",
        "core_v",
        "0.4.0 0.5.0 0.6.0 0.7.0 0.8.0 0.9.0 0.10.0 0.11.0 0.12.0 0.12.1 0.12.2 0.12.3 0.13.0 0.13.1 0.14.0 0.15.0 0.15.1 0.15.2 "
        "0.15.3 0.16.0 0.16.1 0.17.0 0.17.1 0.18.0 0.18.2 0.19.0",
    ),
    "mamba-ssm": (
        "state-spaces/mamba",
        "v",
        "1.0.1 1.1.0 1.1.1 1.1.2 1.1.3.post1 1.1.4 1.2.0 1.2.0.post1 1.2.1 1.2.2 2.0.0 2.0.1 2.0.2 2.0.3 2.0.4 2.1.0 2.2.0 2.2.1 "
        "2.2.2 2.2.3.post2 2.2.4 2.2.5 2.2.6.post3 2.3.0 2.3.1 2.3.2.post1",
    ),
    "liger-kernel": (
        "linkedin/Liger-Kernel",
        "v",
        "0.0.1 0.1.0 0.1.1 0.2.0 0.2.1 0.3.0 0.3.1 0.4.0 0.4.1 0.4.2 0.5.0 0.5.1 0.5.2 0.5.3 0.5.4 0.5.5 0.5.6 0.5.7 0.5.8 0.5.9 "
        "0.5.10 0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 0.7.0 0.8.0 0.8.1 0.8.2",
    ),
    "tilelang": (
        "tile-ai/tilelang",
        "v",
        "0.0.1 0.1.0 0.1.1 0.1.2 0.1.2.post1 0.1.3 0.1.4 0.1.5 0.1.6.post1 0.1.6.post2 0.1.7 0.1.7.post1 0.1.7.post2 0.1.7.post3 "
        "0.1.8 0.1.9 0.1.10 0.1.11 0.1.12 0.1.13",
    ),
}
"""By distribution: the repository, the prefix of its tags, and the releases with such a tag on 2026-11-23."""


def page_of(distribution: str, version: str) -> str | None:
    """Return the address of the page of a release, or None where no tag of it was seen."""
    repository, prefix, versions = _SEEN.get(distribution, ("", "", ""))
    if version not in versions.split():
        return None
    return f"https://github.com/{repository}/releases/tag/{prefix}{version}"
