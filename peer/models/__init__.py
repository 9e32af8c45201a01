"""Networks of a peer: the papers' pools, small ones for CPUs, and any `package.module:callable`."""

from peer.models.registry import build, describe, names

__all__ = ["build", "describe", "names"]
