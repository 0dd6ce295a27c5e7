"""The checks of `spes-p2p doctor`, by what they look at: this machine, the data folder, the network."""
