"""The shell: executes the round machine's effects over the real network, store and trainer."""
