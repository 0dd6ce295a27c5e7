"""One voter's open round with everybody else played by hand: for tests of votes, locks and local checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.certificate import make_qc
from spes_p2p.protocol.codec import body_hash, cut_hash, decode, sign
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.history import History
from spes_p2p.protocol.messages import (
    CutAnnouncement,
    CutMessage,
    Message,
    PartDigest,
    Proposal,
    ProposalMessage,
    QuorumCertificate,
    Signed,
    ViewChange,
    Vote,
)
from spes_p2p.protocol.norms import Yardstick
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import Transition, advance
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.protocol_cases import body_of, cut_of, vote_of


class OneVoter:
    """The round after `head` as the last leader in order sees it, who leads none of the first n - 1 views; or as `me`
    does, who may be no voter at all."""

    def __init__(
        self,
        head: Head,
        peers: Sequence[Identity],
        journal: Mapping[str, bytes] | None = None,
        *,
        me: Identity | None = None,
    ) -> None:
        self.head, self.terms = head, Terms(head)
        by_id = {peer.peer_id: peer for peer in peers}
        self.leaders = [by_id[peer] for peer in self.terms.leaders]
        self.me = me or self.leaders[-1]
        self.others = [peer for peer in self.leaders if peer != self.me]
        self.journal: dict[str, bytes] = dict(journal or {})
        self.sent: list[tuple[PeerId, Message]] = []
        self.effects: list[fx.Effect] = []
        outbox = Outbox(self.terms.config.protocol.resend_ms)
        self.context = Context(
            terms=self.terms,
            signer=self.me,
            verifier=verify,
            outbox=outbox,
            private_seed=digest("private", self.me.peer_id),
            now_ms=0,
            opened_at_ms=0,
        )
        self.context.restore(self.journal)
        history = History(norms=Yardstick(psi=((2.0, 10),), experts=((1.0, 10),)))  # those of made-up updates
        history.enter_rows(head.state.shards, head.round)
        self.round = OpenRound(self.context, history)
        self.round.restore()
        self.context.state_ready = True
        self._collect()

    # --- time and messages -------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for effect in self.context.effects:
            self.effects.append(effect)
            if isinstance(effect, fx.Persist):
                self.journal.update(effect.entries)
            elif isinstance(effect, fx.Send):
                self.sent.append((effect.to, decode(effect.data)))
        self.context.effects = []

    def wait(self, delay_ms: int) -> None:
        """Let time pass, tick by tick."""
        end = self.context.now_ms + delay_ms
        while self.context.now_ms < end:
            self.context.now_ms = min(end, self.context.now_ms + 100)
            self.context.tick()
            self.round.tick()
            self.round.advance()
        self._collect()

    def hear(self, sender: Identity, *messages: Message) -> None:
        """Messages of one peer."""
        for message in messages:
            self.round.remote(sender.peer_id, message)
            self.round.advance()
        self._collect()

    def hear_all(self, *statements: Signed) -> None:
        """Signed messages, each from its author; own ones are said."""
        for signed in statements:
            if signed.peer == self.me.peer_id:
                self.round.say(signed)
                self.round.advance()
                self._collect()
            else:
                self.hear(next(peer for peer in self.others if peer.peer_id == signed.peer), signed)

    # --- what the others do ------------------------------------------------------------------------------------------

    def cut(self, items: Iterable[Item], view: int = 0) -> Transition:
        """The leader of a view names a cut."""
        cut, chosen = cut_of(self.head, items)
        leader = self.leaders[view]
        announcement = CutAnnouncement(self.head.run.run_id, self.head.epoch, self.terms.round, view, cut_hash(cut))
        self.hear(leader, CutMessage(sign(leader, announcement), cut))
        return advance(self.terms, cut_hash(cut), chosen, verify)

    def propose(self, body: Body, view: int = 0, qc: QuorumCertificate | None = None) -> Digest:
        """The leader of a view proposes a body; returns its hash."""
        leader, identity = self.leaders[view], body_hash(body)
        proposal = Proposal(self.head.run.run_id, self.head.epoch, self.terms.round, view, identity, qc)
        self.hear(leader, ProposalMessage(sign(leader, proposal), body, b""))
        return identity

    def others_vote(
        self, step: Step, body: Digest, view: int = 0, *, held: Sequence[bool] = (True, True, True)
    ) -> None:
        """As many of the others vote as `held` is long."""
        for peer, says in zip(self.others, held, strict=False):
            self.hear(peer, vote_of(self.terms, peer, step, body, view=view, held=says))

    def qc_of(self, body: Digest, view: int) -> QuorumCertificate:
        """Prevotes of all others in a view, that need not have happened here."""
        votes = {
            peer.peer_id: vote_of(self.terms, peer, Step.PREVOTE, body, view=view, held=True) for peer in self.others
        }
        return make_qc(self.terms, body, view, votes)

    def others_ask_for_view(self, view: int, number: int, qc: QuorumCertificate | None = None) -> None:
        """So many of the others sign `View{view}`."""
        for peer in self.others[:number]:
            wish = ViewChange(self.head.run.run_id, self.head.epoch, self.terms.round, view, qc)
            self.hear(peer, sign(peer, wish))

    def digests_come(self, transition: Transition, body: Body, parts: Iterable[int]) -> None:
        """The first aggregators of these parts send the digests that `body` has."""
        by_id = {peer.peer_id: peer for peer in self.leaders}
        for part in parts:
            for peer in self.terms.aggregators[part][: self.terms.replicas]:
                value = PartDigest(
                    self.head.run.run_id,
                    self.head.epoch,
                    self.terms.round,
                    part,
                    transition.updates_hash,
                    body.parts[part],
                )
                self.hear_digest(sign(by_id[peer], value))

    def hear_digest(self, signed: Signed) -> None:
        """An aggregator's digest, this voter's own included."""
        self.round.parts.add(signed)
        self.round.advance()
        self._collect()

    # --- what this voter did -----------------------------------------------------------------------------------------

    def votes(self, step: Step, view: int = 0) -> list[tuple[Digest, bool]]:
        """(body, held) of every different vote that this voter sent."""
        found = []
        for _, message in self.sent:
            if isinstance(message, Signed) and isinstance(message.body, Vote) and message.peer == self.me.peer_id:
                vote = message.body
                if (vote.step, vote.view) == (step, view) and (vote.body, vote.held) not in found:
                    found.append((vote.body, vote.held))
        return found

    def asked_views(self) -> list[int]:
        """Views that this voter has asked for."""
        bodies = [
            message.body for _, message in self.sent if isinstance(message, Signed) and message.peer == self.me.peer_id
        ]
        return sorted({body.view for body in bodies if isinstance(body, ViewChange)})

    def quiet_body(self, items: Iterable[Item], view: int = 0) -> Body:
        """Name a cut without updates, and return the body that follows from it."""
        return body_of(self.head, self.cut(items, view))
