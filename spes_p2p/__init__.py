"""Peer-to-peer training of mixture-of-experts language models by volunteers (SPES without a server)."""

__version__ = "0.1.0"
