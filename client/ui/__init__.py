"""The terminal UI: a function of NodeSnapshot, fed by a node's local API."""
