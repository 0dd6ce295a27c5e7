"""A whole swarm on this machine: what `spes-p2p demo` runs."""
