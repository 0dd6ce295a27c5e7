"""Held-out loss of the state that a fresh joiner would get: rebuilt from a peer's ledger and blobs, as a joiner does.

The peers' own evaluations use their own masters, which differ from the certified values by less than a rounding. Runs
in a process of its own (`python -m spes_p2p.client.demo.newcomer PEER_FOLDER`), which ends with torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spes_p2p.client.demo.processes import output_of
from spes_p2p.errors import SpesError


def newcomers_loss(peer_folder: Path) -> float:
    """Nats per byte of the newest certified state in the folder. Raises SpesError if it cannot be rebuilt."""
    return float(output_of("spes_p2p.client.demo.newcomer", [str(peer_folder)], peer_folder.parent))


def evaluate_newest(peer_folder: Path) -> float:
    """The same in this process. Raises SpesError."""
    import torch

    from spes_p2p.config import RunConfig
    from spes_p2p.node.files import BLOBS_FOLDER, LEDGER_FILE
    from spes_p2p.node.history import read_manifest
    from spes_p2p.node.settle import start_spec
    from spes_p2p.node.sizes import piece_sizes
    from spes_p2p.node.stored import walk
    from spes_p2p.protocol.head import genesis_head
    from spes_p2p.storage.blobs import DiskBlobs
    from spes_p2p.storage.ledger import Ledger
    from spes_p2p.training.evaluate import evaluate_weights
    from spes_p2p.training.heldout import decode_held_out
    from spes_p2p.training.start import StartReader

    torch.set_num_threads(1)
    signed = read_manifest(peer_folder)
    if signed is None:
        raise SpesError(f"{peer_folder} has joined no run")
    config = RunConfig.from_json(signed.manifest.config)
    blobs = DiskBlobs(peer_folder / BLOBS_FOLDER)
    ledger = Ledger(peer_folder / LEDGER_FILE)
    try:
        head, merge_lists = genesis_head(signed.manifest, piece_sizes(config)), b""
        for step in walk(ledger, head):
            head, merge_lists = step.after, step.certificate.merge_lists
    finally:
        ledger.close()
    reader = StartReader(config, blobs, start_spec(head, merge_lists))
    documents = decode_held_out(blobs.read(signed.manifest.held_out))
    return evaluate_weights(config, reader.psi(), reader.starts(), documents).nats_per_byte


if __name__ == "__main__":
    print(evaluate_newest(Path(sys.argv[1])))
