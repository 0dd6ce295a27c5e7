"""The round protocol, pure: messages, time and results go in, effects and deadlines come out.

Nothing here imports asyncio, torch, hivemind, a clock or a global random. docs/protocol.md is the specification.
"""
