"""The commands, one per file. None of them imports torch or hivemind before it needs them."""
