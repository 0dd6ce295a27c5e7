"""What must hold in a simulated swarm, checked while it runs (docs/protocol.md, section 10).

    S1   at every adoption: one final body per (epoch, height)
    S2   at every message of an honest peer, its crashes included: one value per slot it signs (votes, cuts, proposals,
         updates, part digests, view changes), and acks of one manifest per slot
    S3   at every adoption: the round is the next one of the same chain, a final one follows the last final one over its
         `via`, and nothing final is ever passed over or left
    S4   once per body: every blob that enters was made for that shard by a peer that owned it since before it trained;
         nobody owns more than it may, owners are members
    S5   once per body: an update whose receipt so many honest voters held complete before their view 0, a time-out
         earlier, that the others are no quorum, is in the certificate
    S6   once per body: some honest peer has every blob of the state on its disk
    S7   at every result: honest aggregators of the same part and updates have the same bytes
    S8   once per body: newcomers were admitted, and voters grow no faster than the rules allow
    S9   once per body: who is out has left, was proven to equivocate (never an honest peer), is left out by a recovery
         or has no item in the last two final cuts
    S10  at every adoption: a tentative head is never counted as final; q voters signed a final one in the final ballot,
         and a side a tentative one in its own, as far as it may; a tentative one changes no roster (`sim/finality.py`)
    S11  at every restart: the disk is the state after the last adopted certificate, or the one before it

Two more at every event: time that a machine asks for is in the future, and no honest peer's message is refused for
what it says of itself (the swarm's `problems` are left to the tests).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spes_p2p.digests import digest
from spes_p2p.errors import SpesError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body, Certificate, base_of
from spes_p2p.protocol.codec import decode_signed, statement_hash
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Ack, Evidence, Manifest, PartDigest, Piece, Receipt, Signed
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.params import MIN_BYZANTINE_VOTERS, SILENT_ROUNDS
from spes_p2p.protocol.wire import ItemKind, PieceKind
from spes_p2p.testing.sim import finality, rules
from spes_p2p.testing.sim.blobs import state_blobs
from spes_p2p.testing.sim.peer import SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm


class InvariantError(SpesError):
    """Something happened in a simulated swarm that must never happen."""


class Monitor:
    """Watches one swarm."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.trace_hash = digest("trace")
        self.finals: dict[tuple[int, int], Digest] = {}
        self.heads: dict[Digest, Head] = {}
        """Every head that anybody adopted, by hash."""
        self.adopted_at_ms: dict[Digest, int] = {}
        """When the first peer did."""
        self.adopters: dict[Digest, PeerId] = {}
        self.certificates: dict[Digest, Certificate] = {}
        self.manifests: dict[Digest, tuple[PeerId, Manifest]] = {}
        """Every update that left anybody, by statement."""
        self.receipted_at: dict[Digest, tuple[int, int]] = {}
        """Update -> (round, when) its honest author had the receipt."""
        self.evicted: dict[PeerId, tuple[int, str]] = {}
        """Who was put out last: (round, why)."""
        self.noticed: Callable[[Head, Head], None] = lambda before, head: None
        """Called with each head that is new to all, and the one before it."""
        self._proofs: dict[Digest, PeerId] = {}
        """Evidence statement -> accused."""
        self._signed: dict[tuple[PeerId, rules.Slot], Signed] = {}
        self._acked: dict[tuple[PeerId, PeerId, Digest], Digest] = {}
        self._results: dict[tuple[int, Digest, int], Digest] = {}
        self._blob_makers: dict[Digest, tuple[PeerId, int, int]] = {}
        """Expert blob -> (author, base round, shard)."""
        self._pressing: dict[tuple[Digest, Digest], set[PeerId]] = {}
        """(head, update) -> honest voters that insisted on it."""
        self._before: tuple[int, OpenRound] | None = None
        self._present: dict[Digest, tuple[frozenset[PeerId], ...]] = {}
        """Final head -> who has an item in the final cuts up to it, the newest last."""

    def broken(self, what: str) -> InvariantError:
        """The error that says so."""
        return InvariantError(f"seed {self._swarm.seed}, at {self._swarm.now_ms} ms: {what}")

    def name(self, peer: PeerId) -> str:
        """A peer's name."""
        known = self._swarm.peers.get(peer)
        return known.name if known is not None else peer.hex()[:8]

    # --- signatures (S2, S7) -----------------------------------------------------------------------------------------

    def sent(self, peer: SimPeer, send: fx.Send) -> None:
        """A message leaves."""
        self.trace_hash = digest("trace", self.trace_hash, self._swarm.now_ms, peer.peer_id, send.to, send.data)
        message = self._swarm.derive.message(send.data)
        if isinstance(message, Receipt) and self.manifests.get(message.manifest, (None,))[0] == peer.peer_id:
            self.receipted_at.setdefault(message.manifest, (peer.machine.terms.round, self._swarm.now_ms))
        for signed in rules.signed_in(message):
            self._note(signed)
            if signed.peer == peer.peer_id and peer.watched:
                self._check_promise(peer, signed)

    def trained(self, peer: SimPeer, round_number: int, pieces: tuple[Piece, ...]) -> None:
        """A peer has made these pieces."""
        for piece in pieces:
            if piece.kind is PieceKind.EXPERT:
                self._blob_makers.setdefault(piece.blob, (peer.peer_id, round_number, piece.index))

    def _note(self, signed: Signed) -> None:
        body = signed.body
        if isinstance(body, Manifest):
            identity = statement_hash(signed)
            if identity not in self.manifests:
                self.manifests[identity] = signed.peer, body
        elif isinstance(body, Evidence):
            self._proofs.setdefault(statement_hash(signed), decode_signed(body.first).peer)

    def _check_promise(self, peer: SimPeer, signed: Signed) -> None:
        slot, body = rules.promise_slot(signed), signed.body
        if slot is not None:
            before = self._signed.setdefault((signed.peer, slot), signed)
            if before.body != body:
                raise self.broken(f"S2: {peer.name} signed two values for {slot[:5]}")
        if isinstance(body, Ack) and body.manifest in self.manifests:
            author, manifest = self.manifests[body.manifest]
            first = self._acked.setdefault((signed.peer, author, manifest.prev), body.manifest)
            if first != body.manifest:
                raise self.broken(f"S2: {peer.name} acknowledged two updates of round {manifest.round} of one peer")
        if isinstance(body, PartDigest) and peer.honest:
            value = self._results.setdefault((body.round, body.updates, body.part), body.digest)
            if value != body.digest:
                raise self.broken(f"S7: {peer.name} has another result of part {body.part} in round {body.round}")

    # --- restarts (S11) ----------------------------------------------------------------------------------------------

    def restarted(self, peer: SimPeer) -> None:
        """A peer starts from its disk."""
        head = peer.heads[-1]
        if peer.machine.head is not head or len(peer.heads) != len(peer.certificates) + 1:
            raise self.broken(f"S11: {peer.name} starts from a state that no certificate made")

    # --- adoptions ---------------------------------------------------------------------------------------------------

    def before(self, peer: SimPeer) -> None:
        """A machine is about to take an input: its open round may end with it."""
        self._before = peer.life, peer.machine._round

    def adopted(self, peer: SimPeer, head: Head, certificate: Certificate) -> None:
        """A peer adopts a certificate."""
        swarm, before = self._swarm, self._base_of(peer, certificate)
        self.trace_hash = digest("trace", self.trace_hash, swarm.now_ms, peer.peer_id, head.hash)
        swarm.log(peer, f"adopts round {head.round} view {certificate.view} {head.hash.hex()[:8]}")
        if rules.is_final(head):
            first = self.finals.setdefault(rules.final_slot(before, head), head.hash)
            if first != head.hash:
                raise self.broken(
                    f"S1: {peer.name} adopted a second final body of height {before.height}, in round {head.round}"
                )
        if certificate.body.final != rules.is_final(head):
            raise self.broken(f"S10: {peer.name} counts a tentative certificate of round {head.round} as final")
        self._raise_if(f"S3: {peer.name} adopted what", finality.link_problem(before, head, certificate, peer.heads))
        unsigned = finality.quorum_problem(before, head, certificate, swarm.verifier)
        self._raise_if(f"S10: {peer.name} adopted round {head.round} with", unsigned)
        if self._before is not None and peer.honest:
            self._insist(peer, self._before[1], before)
        if head.hash not in self.heads:
            self.heads[head.hash] = head
            self.adopted_at_ms[head.hash] = swarm.now_ms
            self.adopters[head.hash] = peer.peer_id
            self.certificates[head.hash] = certificate
            self._check_body(before, head, certificate.body)
            self.noticed(before, head)
        if peer.honest:
            self._check_insisted(before, head, certificate.body)

    def leaves(self, peer: SimPeer, abandoned: tuple[Digest, ...]) -> None:
        """A peer is about to leave certificates of its chain."""
        self._raise_if(f"S3: {peer.name}", finality.left_problem(peer.heads, abandoned))

    def _raise_if(self, what: str, problem: str) -> None:
        if problem:
            raise self.broken(f"{what} {problem}")

    def _base_of(self, peer: SimPeer, certificate: Certificate) -> Head:
        """The head, of those that the peer has or of its height, that a certificate builds on."""
        base = base_of(certificate.body)
        found = next((head for head in reversed(peer.heads) if head.hash == base), None)
        if found is None:
            raise self.broken(f"S3: {peer.name} adopted round {certificate.body.round} on top of another chain")
        return found

    def _check_body(self, before: Head, head: Head, body: Body) -> None:
        """What is checked once for each body."""
        self._raise_if(f"S10: round {head.round}:", finality.tentative_problem(head))
        self._count_present(before, head, body)
        self._check_owners(before, head, body)
        self._check_holders(head)
        self._check_growth(Terms(before), head, body)
        self._check_evictions(before, head, body)

    def _check_owners(self, before: Head, head: Head, body: Body) -> None:
        for change in body.shard_delta:
            for share in change.blobs:
                maker = self._blob_makers.get(share.blob)
                if maker is None or maker[2] != change.shard:
                    raise self.broken(
                        f"S4: round {head.round} gives shard {change.shard} a blob that nobody made for it"
                    )
                tenure = next((t for t in before.state.leases[change.shard].owners if t.who == maker[0]), None)
                if tenure is None or tenure.begun >= maker[1]:
                    raise self.broken(f"S4: round {head.round} takes shard {change.shard} from one who did not own it")
        terms = Terms(head)
        members = set(head.state.members)
        for row in head.state.leases:
            owners = head.state.owners(row.shard)
            if len(set(owners)) != len(owners) or not set(owners) <= members:
                raise self.broken(f"S4: shard {row.shard} has wrong owners after round {head.round}")
        for peer in members:
            too_many = len(head.state.shards_of(peer)) > rules.most_shards(terms, peer)
            if too_many and self._took_on(before, head, peer):
                raise self.broken(f"S4: {self.name(peer)} owns more than it may after round {head.round}")

    def _took_on(self, before: Head, head: Head, peer: PeerId) -> bool:
        """Whether a certificate gave a peer a shard: one that lowers its capacity keeps what it has."""
        return bool(set(head.state.shards_of(peer)) - set(before.state.shards_of(peer)))

    def _check_holders(self, head: Head) -> None:
        disks = [peer.blobs for peer in self._swarm.peers.values() if peer.honest]
        for blob in state_blobs(head):
            if not any(blob in disk for disk in disks):
                raise self.broken(f"S6: no honest peer holds a blob of round {head.round}")

    def _check_growth(self, before: Terms, head: Head, body: Body) -> None:
        new = set(head.state.voters) - set(before.voters)
        founders = set(head.run.manifest.founders)
        fallen = len(head.state.voters) < MIN_BYZANTINE_VOTERS  # then the founders vote, or all who qualify
        if len(new) > rules.most_new_voters(before, head) and not (fallen or new <= founders):
            raise self.broken(f"S8: {len(new)} new voters in round {head.round}")
        for peer in body.newcomers:
            if peer not in self._swarm.peers:
                raise self.broken(f"S8: round {head.round} admits a stranger")

    def _count_present(self, before: Head, head: Head, body: Body) -> None:
        if not head.is_final:
            return
        kinds = [kind for kind in ItemKind if kind is not ItemKind.EVIDENCE]
        here = frozenset(author for kind in kinds for author, _ in rules.authors(before, body, kind))
        if head.epoch > before.epoch:
            here = frozenset(head.state.members)
        genesis = (frozenset(self._swarm.genesis.state.members),)
        cuts = (*self._present.get(before.last_final.hash, genesis), here)
        self._present[head.hash] = cuts[-SILENT_ROUNDS:]

    def _check_evictions(self, before: Head, head: Head, body: Body) -> None:
        leaving = {author for author, _ in rules.authors(before, body, ItemKind.LEAVE)}
        accused = {self._proofs.get(proof) for _, proof in rules.authors(before, body, ItemKind.EVIDENCE)}
        for peer in sorted(set(before.state.members) - set(head.state.members)):
            if peer in accused:
                self.evicted[peer] = head.round, "evidence"
                if self._swarm.peers[peer].watched:
                    raise self.broken(f"S9: {self.name(peer)} is honest and evicted by evidence in round {head.round}")
            elif peer in leaving:
                self.evicted[peer] = head.round, "left"
            elif head.epoch > before.epoch:
                self.evicted[peer] = head.round, "left out by a recovery"
            elif finality.was_silent(peer, self._present.get(head.hash, ()), SILENT_ROUNDS):
                self.evicted[peer] = head.round, "silent"
                self._swarm.log(self._swarm.peers[peer], f"is out after round {head.round}: silent")
            else:
                raise self.broken(f"S9: {self.name(peer)} is out after round {head.round} without a reason")

    # --- receipts (S5) -----------------------------------------------------------------------------------------------

    def _insist(self, peer: SimPeer, open_round: OpenRound, before: Head) -> None:
        """Note the receipted updates without which this voter prevotes nothing new in the round that ends."""
        context, voting = open_round.context, open_round.voting
        if (
            context.terms.head is not before
            or context.terms.tentative
            or not context.is_voter
            or voting.first not in voting.began_at_ms
        ):
            return
        limit_ms = voting.began_at_ms[voting.first] - context.terms.config.protocol.view_timeout(0)
        for (kind, _, _), held in open_round.updates.slots.items():
            early = max(held.held_at_ms, held.receipt_held_at_ms) <= limit_ms
            if kind is ItemKind.UPDATE and early and open_round.cuts.includable(held):
                self._note(held.signed)
                self._pressing.setdefault((before.hash, held.hash), set()).add(peer.peer_id)

    def _check_insisted(self, before: Head, head: Head, body: Body) -> None:
        if not rules.is_final(head) or head.epoch > before.epoch:
            return
        terms = Terms(before)
        inside = {
            (author, self._base_round(statement)) for author, statement in rules.authors(before, body, ItemKind.UPDATE)
        }
        for (of, update), voters in self._pressing.items():
            if of != before.hash or len(terms.voters) - len(voters) >= terms.quorum:
                continue
            author, manifest = self.manifests[update]
            if (author, manifest.round) not in inside:
                raise self.broken(f"S5: round {head.round} leaves out the receipted update of {self.name(author)}")

    def _base_round(self, statement: Digest) -> int:
        return self.manifests[statement][1].round if statement in self.manifests else -1
