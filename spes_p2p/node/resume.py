"""Where a node begins after a restart: the newest certificate of its ledger, and what happened since its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.settle import Since, branch_lost, since, then
from spes_p2p.node.state_sync import Newest
from spes_p2p.node.stored import Jump, StoredChain, walk, walk_to_tip
from spes_p2p.node.worker_messages import Ready
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Head
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a trainer's checkpoint is."""

    round: int
    base: Digest
    """Hash of the certificate that the round starts from."""


def checkpoint_of(ready: Ready) -> Checkpoint | None:
    """The checkpoint that a trainer has resumed from."""
    return None if ready.resumed_round is None else Checkpoint(round=ready.resumed_round, base=ready.resumed_base)


class Resumption:
    """Where a node is in the chain, and what happened since its trainer's checkpoint, certificate by certificate."""

    def __init__(self, head: Head, checkpoint: Checkpoint | None, peer: PeerId) -> None:
        """`head`: genesis, or a final one at or before the checkpoint; `checkpoint`: None: there is none."""
        self.head = head
        self._certificate: Certificate | None = None
        self._checkpoint = checkpoint
        self._peer = peer
        self._since: Since | None = None
        self._jumped = False
        self._note_checkpoint()
        self._at_final: tuple[Head, Certificate | None, Since | None] = (self.head, None, self._since)

    def step(self, certificate: Certificate, after: Head) -> None:
        """The next certificate."""
        if self._since is not None:
            self._since = then(self._since, self.head, after, certificate.body, self._peer)
        self._go_to(certificate, after)

    def jump(self, certificate: Certificate, after: Head) -> None:
        """A certificate on the far side of a gap: nobody knows what happened to the checkpoint meanwhile."""
        self._since = None
        self._jumped = True
        self._go_to(certificate, after)

    def rewind(self) -> None:
        """To the last final certificate: what it leads to may be another branch."""
        self.head, self._certificate, self._since = self._at_final

    def to_tip(self, ledger: Ledger) -> None:
        """From the last final certificate on to the tip that this node was on. Raises LocalStateError."""
        self.rewind()
        for step in walk_to_tip(ledger, self.head):
            self.step(step.certificate, step.after)

    def newest(self) -> Newest:
        """Where the node begins."""
        found = self._since
        if found is None and self._checkpoint is not None and not self._jumped:
            found = branch_lost(self.head)
        return Newest(head=self.head, certificate=self._certificate, since=found)

    def _go_to(self, certificate: Certificate, after: Head) -> None:
        self.head, self._certificate = after, certificate
        self._note_checkpoint()
        if after.is_final:
            self._at_final = (self.head, self._certificate, self._since)

    def _note_checkpoint(self) -> None:
        if self._checkpoint is not None and self._checkpoint.base == self.head.hash:
            self._since = since(self.head, self._peer)


def resume(ledger: Ledger, genesis: Head, checkpoint: Checkpoint | None, peer: PeerId) -> Resumption:
    """The newest final head of a ledger; `to_tip` goes on from there. `checkpoint`: of the trainer; None: it has none.

    Raises LocalStateError if the ledger's certificates are not a chain from this genesis.
    """
    latest = ledger.latest()
    newest_round = latest.round if latest is not None else 0
    begin = newest_round if checkpoint is None else min(newest_round, checkpoint.round - 1)
    # one before the newest: its certificate, with the merge lists, is wanted as well
    start = StoredChain(ledger, genesis).nearest(max(0, min(begin, newest_round - 1)))
    so_far = Resumption(start, checkpoint, peer)
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
