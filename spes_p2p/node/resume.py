"""Where a node begins after a restart: the newest certificate of its ledger, and what happened since its checkpoint."""

from __future__ import annotations

from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.settle import Since, since, then
from spes_p2p.node.state_sync import Newest
from spes_p2p.node.stored import Jump, StoredChain, walk
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Head
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger


class Resumption:
    """Where a node is in the chain, and what happened since its trainer's checkpoint, certificate by certificate."""

    def __init__(self, head: Head, resumed_round: int | None, peer: PeerId) -> None:
        """`head`: genesis, or one at or before the checkpoint; `resumed_round`: the round that the checkpoint is in;
        None: there is none."""
        self.head = head
        self._certificate: Certificate | None = None
        self._resumed_round = resumed_round
        self._peer = peer
        self._since: Since | None = None
        self._note_checkpoint()

    def step(self, certificate: Certificate, after: Head) -> None:
        """The next certificate."""
        if self._since is not None:
            self._since = then(self._since, self.head, after, certificate.body, self._peer)
        self._go_to(certificate, after)

    def jump(self, certificate: Certificate, after: Head) -> None:
        """A certificate on the far side of a gap: nobody knows what happened to the checkpoint meanwhile."""
        self._since = None
        self._go_to(certificate, after)

    def newest(self) -> Newest:
        """Where the node begins."""
        return Newest(head=self.head, certificate=self._certificate, since=self._since)

    def _go_to(self, certificate: Certificate, after: Head) -> None:
        self.head, self._certificate = after, certificate
        self._note_checkpoint()

    def _note_checkpoint(self) -> None:
        if self._resumed_round == self.head.round + 1:
            self._since = since(self.head, self._peer)


def resume(ledger: Ledger, genesis: Head, resumed_round: int | None, peer: PeerId) -> Resumption:
    """The newest head of a ledger. `resumed_round`: the round that the trainer's checkpoint is in; None: there is none.

    Raises LocalStateError if the ledger's certificates are not a chain from this genesis.
    """
    latest = ledger.latest()
    newest_round = latest.round if latest is not None else 0
    begin = newest_round if resumed_round is None else min(newest_round, resumed_round - 1)
    # one before the newest: its certificate, with the merge lists, is wanted as well
    start = StoredChain(ledger, genesis).nearest(max(0, min(begin, newest_round - 1)))
    so_far = Resumption(start, resumed_round, peer)
    for step in walk(ledger, start):
        if isinstance(step, Jump):
            so_far.jump(step.certificate, step.after)
        else:
            so_far.step(step.certificate, step.after)
    return so_far


def drop_damaged(blobs: DiskBlobs) -> tuple[Digest, ...]:
    """Read everything in the store, drop the blobs that do not match their ids, and return those.

    What the state needs of them is fetched again. Reading does not notice a flipped bit, and a peer that signs results
    of damaged pieces, or refuses good updates because of them, would seem to lie. Raises MachineError if the disk
    refuses.
    """
    return tuple(blob for blob in blobs.ids() if not blobs.verify(blob))
