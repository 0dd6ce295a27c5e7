"""Byzantine peers that are cunning: what they say is valid, and different for each half of the voters.

A peer that merely signs nonsense, or two things at random, is refused or outvoted whatever the rules are. These play
against one rule each, with the network's help (`Swarm.route`): a quorum one too small, a missing lock, an ignored
*held*, a promise that was not kept through a crash. `scripts` of the simulated swarm, not of real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body, Cut, CutItem
from spes_p2p.protocol.codec import bits, body_hash, cut_hash, decode, encode, sign, statement_hash
from spes_p2p.protocol.messages import (
    Claim,
    CutAnnouncement,
    CutMessage,
    Manifest,
    Message,
    Proposal,
    ProposalMessage,
    Receipt,
    Signed,
    Vote,
)
from spes_p2p.protocol.statements import Item, item_sort_key
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, Step
from spes_p2p.testing.swarm import SimPeer, Swarm

Tamper = Callable[[fx.Send], bytes | None]

CUNNING_CAPACITY = 9
"""What a two-faced leader claims in its second cut only."""


def inject(swarm: Swarm, sender: SimPeer, target: PeerId, message: Message) -> None:
    """A message that no machine asked for: it arrives a millisecond later."""
    data = encode(message)
    swarm.at(1, lambda: swarm.give(swarm.peers[target], fx.Received(sender=sender.peer_id, data=data)))


def items_of(peer: SimPeer, cut: Cut) -> tuple[Item, ...]:
    """The statements behind a cut, as the peer's own machine holds them. Raises KeyError for one that it lacks."""
    by_hash = peer.machine._round.updates.by_hash
    return tuple(Item(entry=entry, signed=by_hash[entry.statement].signed) for entry in cut.items)


@dataclass(slots=True, kw_only=True)
class TwoFaced:
    """The leader of one view makes two valid cuts and bodies, shows each to a part of the voters, and votes for both.

    The second differs by a claim of the leader, so that all updates and part results are the same and nothing in it
    can be refused. `second`: who sees it. `accomplices` vote for both as well. Install with `begin`.
    """

    swarm: Swarm
    leader: SimPeer
    round: int
    view: int = 0
    second: frozenset[PeerId]
    accomplices: Sequence[SimPeer] = ()
    shown: dict[PeerId, Digest] = field(default_factory=dict)
    """Voter -> body that it was shown."""

    def begin(self) -> None:
        """From now on the leader lies in its view, and its accomplices with it."""
        self.leader.tampers = self._as_leader
        for accomplice in self.accomplices:
            accomplice.tampers = self._as_accomplice(accomplice)

    def _as_leader(self, send: fx.Send) -> bytes | None:
        message = decode(send.data)
        if self.leader.machine.terms.round != self.round:
            return send.data
        if self._own_vote(message, self.leader):
            return None  # votes go out with the proposals
        if isinstance(message, CutMessage) and self._mine(message.announcement):
            return encode(self._second_cut(message, send.to)) if send.to in self.second else send.data
        if isinstance(message, ProposalMessage) and self._mine(message.proposal):
            if send.to in self.second:
                message = self._second_proposal(message)
            self._vote_with(send.to, body_hash(message.body))
            return encode(message)
        return send.data

    def _as_accomplice(self, accomplice: SimPeer) -> Tamper:
        def tamper(send: fx.Send) -> bytes | None:
            lies = accomplice.machine.terms.round == self.round and self._own_vote(decode(send.data), accomplice)
            return None if lies else send.data

        return tamper

    def _mine(self, signed: Signed) -> bool:
        body = signed.body
        ours = isinstance(body, CutAnnouncement | Proposal) and body.view == self.view
        return ours and signed.peer == self.leader.peer_id

    def _own_vote(self, message: Message, peer: SimPeer) -> bool:
        """A vote in the view in question, which would spoil the lie."""
        if not isinstance(message, Signed) or message.peer != peer.peer_id:
            return False
        return isinstance(message.body, Vote) and message.body.view == self.view

    def _claim(self) -> Signed:
        head = self.leader.machine.head
        return sign(self.leader.identity, Claim(head.run.run_id, head.epoch, self.round, CUNNING_CAPACITY))

    def _other(self, cut: Cut) -> tuple[Cut, tuple[Item, ...]]:
        """The cut with the leader's claim in it."""
        claim = self._claim()
        entry = CutItem(ItemKind.CLAIM, claim.peer, statement_hash(claim), NO_DIGEST)
        taken = (ItemKind.CLAIM, claim.peer)
        kept = [item for item in items_of(self.leader, cut) if (item.entry.kind, item.entry.peer) != taken]
        items = tuple(sorted([*kept, Item(entry=entry, signed=claim)], key=lambda item: item_sort_key(item.entry)))
        return structs.replace(cut, items=tuple(item.entry for item in items)), items

    def _second_cut(self, message: CutMessage, target: PeerId) -> CutMessage:
        inject(self.swarm, self.leader, target, self._claim())
        cut, _ = self._other(message.cut)
        announcement = structs.replace(message.announcement.body, cut=cut_hash(cut))
        return CutMessage(sign(self.leader.identity, announcement), cut)

    def _second_proposal(self, message: ProposalMessage) -> ProposalMessage:
        """A valid body of the second cut, with the part results of the first and no quorum certificate."""
        machine, first = self.leader.machine, message.body
        known = machine._round.cuts.known[first.cut]
        cut, items = self._other(known.cut)
        transition = advance(machine.terms, cut_hash(cut), items, machine._verifier)
        kept = bits(first.kept, len(first.parts))
        results = tuple(None if part in kept else value for part, value in enumerate(first.parts))
        body = make_body(machine.terms, transition, results, message.merge_lists)
        proposal = structs.replace(message.proposal.body, body=body_hash(body), qc=None)
        return ProposalMessage(sign(self.leader.identity, proposal), body, message.merge_lists)

    def _vote_with(self, target: PeerId, body: Digest) -> None:
        """Prevote and precommit of all liars for the body that this voter sees."""
        self.shown[target] = body
        head = self.leader.machine.head
        for liar in (self.leader, *self.accomplices):
            for step in (Step.PREVOTE, Step.PRECOMMIT):
                held = step is Step.PREVOTE
                vote = Vote(head.run.run_id, head.epoch, self.round, self.view, step, body, held)
                inject(self.swarm, liar, target, sign(liar.identity, vote))


def omit_update(swarm: Swarm, leader: SimPeer, victim: PeerId, round_number: int) -> None:
    """In one round the leader's cut says that the victim is alive, and its receipted update is not in it.

    Cut and body are valid; what is wrong is known only to those who held the receipt in time.
    """

    def second(cut: Cut) -> tuple[Cut, tuple[Item, ...]]:
        items = []
        for item in items_of(leader, cut):
            entry = item.entry
            if (entry.kind, entry.peer) == (ItemKind.UPDATE, victim):
                entry = CutItem(ItemKind.ALIVE, victim, entry.statement, NO_DIGEST)
            items.append(Item(entry=entry, signed=item.signed))
        items.sort(key=lambda item: item_sort_key(item.entry))
        return structs.replace(cut, items=tuple(item.entry for item in items)), tuple(items)

    def shown(target: PeerId, original: Cut) -> Cut:
        cut, items = second(original)
        swarm.at(1_000, lambda: propose(target, cut, items))
        return cut

    def propose(target: PeerId, cut: Cut, items: tuple[Item, ...]) -> None:
        machine = leader.machine
        if machine.terms.round != round_number:
            return
        _propose_items(swarm, leader, target, cut, items)

    _rewrite_cuts(leader, round_number, shown)


def name_in_cut(
    swarm: Swarm, leader: SimPeer, round_number: int, entry: CutItem, named: Signed, receipt: Receipt | None
) -> None:
    """In one round the leader's cut has one item in place of its own update, which everybody has then heard of."""

    def shown(target: PeerId, original: Cut) -> Cut:
        kept = [item for item in original.items if item.peer != leader.peer_id]
        cut = structs.replace(original, items=tuple(sorted([*kept, entry], key=item_sort_key)))
        inject(swarm, leader, target, named)
        if receipt is not None:
            inject(swarm, leader, target, receipt)
        swarm.at(1_500, lambda: propose(target, cut))
        return cut

    def propose(target: PeerId, cut: Cut) -> None:
        """What follows from that cut, if it had been a valid one."""
        machine = leader.machine
        if machine.terms.round != round_number:
            return
        by_hash = machine._round.updates.by_hash
        signed = {entry.statement: named} | {
            item.statement: by_hash[item.statement].signed for item in cut.items if item.statement in by_hash
        }
        items = tuple(Item(entry=item, signed=signed[item.statement]) for item in cut.items)
        _propose_items(swarm, leader, target, cut, items)

    _rewrite_cuts(leader, round_number, shown)


def _rewrite_cuts(leader: SimPeer, round_number: int, shown: Callable[[PeerId, Cut], Cut]) -> None:
    """In one round each voter is shown another cut than the leader's machine made, and none of its proposals."""

    def tamper(send: fx.Send) -> bytes | None:
        message = decode(send.data)
        if leader.machine.terms.round != round_number or not isinstance(message, CutMessage | ProposalMessage):
            return send.data
        if isinstance(message, ProposalMessage):
            return None if message.proposal.peer == leader.peer_id else send.data
        if message.announcement.peer != leader.peer_id:
            return send.data
        cut = shown(send.to, message.cut)
        announcement = structs.replace(message.announcement.body, cut=cut_hash(cut))
        return encode(CutMessage(sign(leader.identity, announcement), cut))

    leader.tampers = tamper


def _propose_items(swarm: Swarm, leader: SimPeer, target: PeerId, cut: Cut, items: tuple[Item, ...]) -> None:
    """The body that follows from a cut, with the part results that the leader has heard of; proposed to one voter."""
    machine = leader.machine
    transition = advance(machine.terms, cut_hash(cut), items, machine._verifier)
    num_parts = len(machine.head.parts)
    results = tuple(machine._round.parts.result(transition.updates_hash, part) for part in range(num_parts))
    body = make_body(machine.terms, transition, results, b"")
    proposal = Proposal(machine.head.run.run_id, machine.head.epoch, machine.terms.round, 0, body_hash(body), None)
    message = ProposalMessage(sign(leader.identity, proposal), body, b"")
    for receiver in (target, leader.peer_id):  # its own machine must not propose something else
        inject(swarm, leader, receiver, message)


def rewrite_proposals(leader: SimPeer, round_number: int, rewrite: Callable[[Body], Body]) -> None:
    """In one round the leader proposes another body of the same cut."""

    def tamper(send: fx.Send) -> bytes | None:
        message = decode(send.data)
        if leader.machine.terms.round != round_number or not isinstance(message, ProposalMessage):
            return send.data
        if message.proposal.peer != leader.peer_id:
            return send.data
        body = rewrite(message.body)
        proposal = structs.replace(message.proposal.body, body=body_hash(body), qc=None)
        return encode(ProposalMessage(sign(leader.identity, proposal), body, message.merge_lists))

    leader.tampers = tamper


def rewrite_manifests(
    peer: SimPeer, round_number: int, rewrite: Callable[[Manifest], Manifest], to: Callable[[PeerId], bool]
) -> None:
    """In one round some see another manifest of this peer than the rest."""

    def tamper(send: fx.Send) -> bytes | None:
        message = decode(send.data)
        if not isinstance(message, Signed) or message.peer != peer.peer_id or not to(send.to):
            return send.data
        if not isinstance(message.body, Manifest) or message.body.round != round_number:
            return send.data
        return encode(sign(peer.identity, rewrite(message.body)))

    peer.tampers = tamper


def add_twin(swarm: Swarm, peer: SimPeer, side: frozenset[PeerId]) -> SimPeer:
    """A second machine with the key and disk of a peer; those of `side` talk to it, and it to them alone.

    The first machine keeps the rest of the swarm. Neither is watched for signing twice, which is what twins do.
    """
    alias = PeerId(digest("twin", peer.peer_id))
    twin = SimPeer(f"{peer.name}'", peer.identity, peer.machine, peer.line, alive=False)
    twin.journal, twin.blobs = dict(peer.journal), set(peer.blobs)
    twin.heads, twin.certificates = list(peer.heads), list(peer.certificates)
    swarm.peers[alias] = twin
    peer.tampers = twin.tampers = lambda send: send.data

    def route(sender: SimPeer, send: fx.Send) -> PeerId | None:
        from_side = sender is twin or sender.peer_id in side
        if send.to == peer.peer_id:
            return alias if from_side else send.to
        return send.to if from_side == (send.to in side) else None

    swarm.route = route
    swarm.restart(twin)
    return twin


def withhold_results(swarm: Swarm, liars: Iterable[SimPeer], says: Callable[[Digest], Digest]) -> set[Digest]:
    """Aggregators that sign a digest (`says`: of the right one) and serve the result to nobody. Returns all it says."""
    said: set[Digest] = set()
    for liar in liars:

        def forget(value: Digest, liar: SimPeer = liar) -> Digest:
            said.add(says(value))
            swarm.at(1, lambda: liar.blobs.discard(says(value)))
            return says(value)

        liar.aggregates = forget
    return said


def crash_after_send(swarm: Swarm, victim: SimPeer, number: int, *, down_ms: int) -> None:
    """Kill a peer right after its `number`-th send from now (1 is the next), restart it from its disk later.

    From then on the network loses whatever would tell the victim what it said itself: it has its journal for that.
    """
    count = 0

    def route(sender: SimPeer, send: fx.Send) -> PeerId | None:
        nonlocal count
        if sender is victim:
            count += 1
            if count == number:
                swarm.kill(victim)
                swarm.at(down_ms, lambda: swarm.restart(victim))
        reminds = count >= number and send.to == victim.peer_id
        if reminds and any(signed.peer == victim.peer_id for signed in signed_in(send.data)):
            return None
        return send.to

    swarm.route = route


def signed_in(data: bytes) -> tuple[Signed, ...]:
    """The signed part of an encoded message, if it has one."""
    match decode(data):
        case Signed() as signed:
            return (signed,)
        case CutMessage() as message:
            return (message.announcement,)
        case ProposalMessage() as message:
            return (message.proposal,)
        case _:
            return ()
