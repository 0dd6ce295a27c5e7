"""Receipts: whether every piece of an update is acknowledged by enough peers (docs/protocol.md, section 4, 3).

A receipt carries of each ack only what the manifest does not say: who, which pieces, and the signature. Whoever checks
it builds the `Ack` again.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.codec import bits, check_signature
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Ack, AckMark, Manifest, Receipt, Signed
from spes_p2p.protocol.wire import PieceKind


def mark_of(signed: Signed) -> AckMark:
    """What a receipt carries of an ack. Raises RemoteProtocolError for what is none."""
    if not isinstance(signed.body, Ack):
        raise RemoteProtocolError(signed.peer, f"a {signed.body.tag} is no ack")
    return AckMark(signed.peer, signed.body.pieces, signed.signature)


def num_acked(mark: AckMark) -> int:
    """Pieces that an ack names."""
    return int.from_bytes(mark.pieces, "little").bit_count()


def check_mark(mark: AckMark, author: PeerId, identity: Digest, manifest: Manifest, verifier: Verifier) -> None:
    """Raises RemoteProtocolError unless this is another peer's ack of pieces of this manifest."""
    if mark.peer == author:
        raise RemoteProtocolError(author, "an update acknowledged by its author")
    ack = Ack(manifest.run, manifest.epoch, manifest.round, identity, mark.pieces)
    check_signature(Signed(mark.peer, ack, mark.signature), verifier)


def check_receipt(terms: Terms, receipt: Receipt, author: PeerId, manifest: Manifest, verifier: Verifier) -> None:
    """Whether every piece has enough acks of other peers that are eligible in this round."""
    peers = [mark.peer for mark in receipt.acks]
    if receipt.round != manifest.round:
        raise RemoteProtocolError(author, "the receipt is of another round than its update")
    if len(set(peers)) != len(peers):
        raise RemoteProtocolError(author, "the receipt has an acker twice")
    for mark in receipt.acks:
        check_mark(mark, author, receipt.manifest, manifest, verifier)
    if not Tally(terms, manifest, receipt.acks).is_enough:
        raise RemoteProtocolError(author, "the receipt lacks acks")


def acks_needed(terms: Terms, kind: PieceKind) -> int:
    """Acks of others for a piece of this kind."""
    return terms.expert_acks if kind is PieceKind.EXPERT else terms.psi_acks


class Tally:
    """Acks of one update, counted as they come; only those of peers that are eligible in this round count."""

    def __init__(self, terms: Terms, manifest: Manifest, acks: Iterable[AckMark] = ()) -> None:
        self._eligible = terms.eligible_set
        self._needed = [acks_needed(terms, piece.kind) for piece in manifest.pieces]
        self._counts = [0] * len(self._needed)
        self._pieces: dict[PeerId, frozenset[int]] = {}
        self._marks: dict[PeerId, AckMark] = {}
        for mark in acks:
            self.add(mark)

    def add(self, mark: AckMark) -> None:
        """Count a checked ack; a later one of the same peer takes the place of the first."""
        if mark.peer not in self._eligible:
            return
        for index in self._pieces.get(mark.peer, ()):
            self._counts[index] -= 1
        self._pieces[mark.peer] = bits(mark.pieces, len(self._needed))
        self._marks[mark.peer] = mark
        for index in self._pieces[mark.peer]:
            self._counts[index] += 1

    @property
    def is_enough(self) -> bool:
        """Whether every piece has the acks that its kind needs."""
        return all(count >= needed for count, needed in zip(self._counts, self._needed, strict=True))

    @property
    def is_everywhere(self) -> bool:
        """Whether every piece has an ack at least."""
        return all(count > 0 for count in self._counts)

    def fewest(self) -> tuple[AckMark, ...]:
        """Enough of the acks and none too many, by peer: what a receipt costs is its signatures."""
        counts, chosen = list(self._counts), dict(self._marks)
        for peer in sorted(chosen, key=lambda peer: (len(self._pieces[peer]), peer)):
            pieces = self._pieces[peer]
            if all(counts[index] > self._needed[index] for index in pieces):
                del chosen[peer]
                for index in pieces:
                    counts[index] -= 1
        return tuple(chosen[peer] for peer in sorted(chosen))
