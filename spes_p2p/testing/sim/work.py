"""What the shell of a simulated node does: training, checking, averaging and adopting, with names for tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import BlobShare
from spes_p2p.protocol.codec import body_hash, pack_float
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Piece
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.wire import PieceKind, RefusalReason
from spes_p2p.testing.sim.peer import SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm


class Work:
    """Executes the effects of machines that are neither messages nor journal entries."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    def execute(self, peer: SimPeer, effect: fx.Effect) -> None:
        """Begin what a machine wants; its result comes back as an input."""
        swarm, line = self._swarm, peer.line
        match effect:
            case fx.Train():
                begun = peer.training = (effect.round, swarm.now_ms)
                peer.trains_on = peer.machine.head
                swarm.after(peer, line.train_ms, lambda: self._ends(peer, begun))
            case fx.StopTraining():
                self.trained(peer, effect.round)
            case fx.CheckPiece():
                self._check(peer, effect)
            case fx.FetchBlob():
                self._fetch(peer, effect)
            case fx.Aggregate():
                self._aggregate(peer, effect)
            case fx.RankExperts():
                lists = _lists(effect.shards)
                swarm.later(peer, line.work_ms, fx.Ranked(cut=effect.cut, merge_lists=lists))
            case fx.CheckRanking():
                problem = None if _lists(effect.shards) == effect.merge_lists else "another ranking"
                swarm.later(peer, line.work_ms, fx.RankingChecked(body=effect.body, problem=problem))
            case fx.Notify():
                peer.notes.append((swarm.now_ms, effect.level, effect.text))
                swarm.log(peer, f"says: {effect.text}")
            case _:
                pass

    # --- training ----------------------------------------------------------------------------------------------------

    def _ends(self, peer: SimPeer, training: tuple[int, int]) -> None:
        """Training has had its time, if it is still the same."""
        if peer.training is training:
            self.trained(peer, training[0])

    def trained(self, peer: SimPeer, round_number: int) -> None:
        """Training ends: with H steps, or with what there is."""
        head = peer.trains_on
        if peer.training is None or head is None or peer.training[0] != round_number or peer.hangs:
            return
        swarm, begun = self._swarm, peer.training[1]
        peer.training = None
        steps = max(1, head.inner_steps * min(swarm.now_ms - begun, peer.line.train_ms) // peer.line.train_ms)
        pieces = self._pieces(peer, head, begun)
        peer.blobs |= {piece.blob for piece in pieces}
        swarm.monitor.trained(peer, round_number, pieces)
        event = fx.Trained(
            round=round_number,
            tokens=steps * swarm.config.training.batch_tokens,
            steps=steps,
            loss_micronats=2_000_000,
            pieces=pieces,
            base=head.hash,
        )
        swarm.later(peer, peer.line.work_ms, event)

    def _pieces(self, peer: SimPeer, head: Head, begun_ms: int) -> tuple[Piece, ...]:
        """What was trained. Nobody trains the same bits twice, so the names depend on when it began."""
        sizes, name = head.run.sizes, (peer.peer_id, head.hash, begun_ms)
        norm, pieces = pack_float(1.0), []
        for part, value in enumerate(head.parts):
            blob = digest("delta", *name, part)
            pieces.append(Piece(PieceKind.PSI, part, blob, sizes.psi_piece_bytes, 0, value, norm))
        for shard in head.state.shards_of(peer.peer_id):
            blob, base = digest("expert", *name, shard), shard_row_hash(head.state.shards[shard])
            pieces.append(Piece(PieceKind.EXPERT, shard, blob, sizes.expert_blob_bytes, 0, base, norm))
        return tuple(pieces)

    # --- others' blobs -----------------------------------------------------------------------------------------------

    def _check(self, peer: SimPeer, effect: fx.CheckPiece) -> None:
        def ended(came: bool) -> None:
            author = self._swarm.peers.get(effect.author)
            reason = author.refuses if author is not None else None
            event = fx.PieceChecked(
                manifest=effect.manifest,
                piece=effect.piece_index,
                reason=reason if came else RefusalReason.MISSING,
            )
            self._swarm.give(peer, event)

        self._swarm.blobs.fetch(peer, effect.piece.blob, effect.piece.size_bytes, effect.sources, ended)

    def _fetch(self, peer: SimPeer, effect: fx.FetchBlob) -> None:
        def ended(came: bool) -> None:
            if came:
                self._swarm.give(peer, fx.BlobHeld(blob=effect.blob))

        self._swarm.blobs.fetch(peer, effect.blob, effect.max_bytes, effect.sources, ended)

    def _aggregate(self, peer: SimPeer, effect: fx.Aggregate) -> None:
        """Average a part once all its pieces are here; try again while the round is open."""
        head = peer.heads[-1]
        pieces = [contribution.pieces[effect.part] for contribution in effect.contributions]
        wanted = {piece.blob: (piece.size_bytes, effect.sources.get(piece.blob, ())) for piece in pieces}

        def ended(came: bool) -> None:
            if came:
                self._averaged(peer, effect)
            elif peer.heads[-1] is head:
                self._aggregate(peer, effect)

        self._swarm.blobs.fetch_all(peer, wanted, ended)

    def _averaged(self, peer: SimPeer, effect: fx.Aggregate) -> None:
        names = [digest("c", c.peer, c.manifest, int(c.weight * 4)) for c in effect.contributions]
        value = peer.aggregates(digest("result", effect.part, effect.previous, *names))
        if not effect.recheck:
            peer.blobs.add(value)
        event = fx.Aggregated(updates=effect.updates, part=effect.part, digest=value, recheck=effect.recheck)
        self._swarm.later(peer, peer.line.work_ms, event)

    # --- adopting ----------------------------------------------------------------------------------------------------

    def adopt(self, peer: SimPeer, effect: fx.Adopt) -> None:
        """Append to the ledger, prune the journal, end the training, load the new state."""
        swarm, head = self._swarm, effect.head
        self.leave_branch(peer, effect.abandoned)
        peer.certificates.append(effect.certificate)
        peer.heads.append(head)
        prefix = f"{head.epoch:06d}/{head.height:010d}/"
        peer.journal = {key: data for key, data in peer.journal.items() if key >= prefix}
        if peer.training is not None:
            self.trained(peer, peer.training[0])
        self.load(peer, head, effect.holders)
        for leaver, blob, _ in effect.handovers:
            owns = any(peer.peer_id in head.state.owners(shard) for shard in range(swarm.config.num_shards))
            if leaver != peer.peer_id and peer.takes_over and owns:
                event = fx.HandoverTaken(leaver=leaver, round=head.round, handover=blob)
                swarm.later(peer, peer.line.transfer_ms, event)

    def leave_branch(self, peer: SimPeer, abandoned: tuple[Digest, ...]) -> None:
        """Forget tentative certificates that are no longer behind the tip."""
        self._swarm.monitor.leaves(peer, abandoned)
        peer.heads = [head for head in peer.heads if head.hash not in abandoned]
        peer.certificates = [c for c in peer.certificates if body_hash(c.body) not in abandoned]

    def go_back(self, peer: SimPeer, effect: fx.GoBack) -> None:
        """The tip is an earlier certificate again: end the training, load its state."""
        self.leave_branch(peer, effect.abandoned)
        if peer.training is not None:
            self.trained(peer, peer.training[0])
        self.load(peer, effect.head, effect.holders)

    def load(self, peer: SimPeer, head: Head, holders: tuple[PeerId, ...] = ()) -> None:
        """Load the state of a head."""
        ready = fx.StateReady(round=head.round + 1, head=head.hash)
        self._swarm.blobs.load(peer, head, holders, lambda: self._swarm.give(peer, ready))


def _lists(shards: tuple[tuple[BlobShare, ...], ...]) -> bytes:
    return digest("lists", *(share.blob for blobs in shards for share in blobs))
