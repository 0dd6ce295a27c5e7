"""Fakes and small swarms for tests and simulations: clock, network, blobs, journal, machines and whole nodes."""
