"""Names of the files in a node's data folder that more than one part of the program opens."""

from __future__ import annotations

IDENTITY_FILE = "identity.key"
"""The peer's key; see storage/identity.py."""
CONTROL_FILE = "control.json"
"""Where the running node's local API is; see node/control.py."""
LOG_FILE = "node.log"
"""What a node behind the terminal UI would have printed."""
MANIFEST_FILE = "run.manifest"
"""The signed run manifest, as it travels."""
BLOBS_FOLDER = "blobs"
JOURNAL_FILE = "journal.sqlite"
LEDGER_FILE = "ledger.sqlite"
TRAINER_FOLDER = "trainer"
"""Checkpoints of the trainer process, and its log."""
RECOVERY_FILE = "recovery.key"
"""Secret half of the run's recovery key; only where the run was created."""
