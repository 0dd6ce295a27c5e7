"""What `spes-p2p estimate` gathers, and how it is told."""
