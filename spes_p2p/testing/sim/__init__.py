"""Parts of the simulated swarm (`testing/swarm.py`), and the scenarios that `spes-p2p simulate` draws."""
