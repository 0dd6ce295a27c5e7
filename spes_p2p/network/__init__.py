"""Peers over libp2p: addresses, invite links, signed hints in the DHT, messages and blob transfers.

Only `guards` and `p2p` import hivemind, which takes seconds and loads torch; `addresses`, `link` and `hints` are pure.
"""
