"""Where a node begins after a restart: the newest certificate of its ledger, and what happened since its checkpoint."""

from __future__ import annotations

from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.history import replay
from spes_p2p.node.settle import since, then
from spes_p2p.node.state_sync import Newest
from spes_p2p.protocol.head import Head
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger


def newest(ledger: Ledger, genesis: Head, resumed_round: int | None, peer: PeerId) -> Newest:
    """The newest head. `resumed_round`: the round that the trainer's checkpoint is in; None: there is none.

    Raises LocalStateError if the ledger's certificates are not a chain from this genesis.
    """
    head, certificate = genesis, None
    so_far = since(genesis, peer) if resumed_round == genesis.round + 1 else None
    for before, certificate, head in replay(ledger, genesis):
        if so_far is not None:
            so_far = then(so_far, before, head, certificate.body, peer)
        if resumed_round == head.round + 1:
            so_far = since(head, peer)
    return Newest(head=head, certificate=certificate, since=so_far)


def drop_damaged(blobs: DiskBlobs) -> tuple[Digest, ...]:
    """Read everything in the store, drop the blobs that do not match their ids, and return those.

    What the state needs of them is fetched again. Reading does not notice a flipped bit, and a peer that signs results
    of damaged pieces, or refuses good updates because of them, would seem to lie. Raises MachineError if the disk
    refuses.
    """
    return tuple(blob for blob in blobs.ids() if not blobs.verify(blob))
