"""Who is asked for certificates, and who is told of them or gets them.

ask       a peer for its tip: it answers with the certificates that are lacking, or with all of the open round
told      a peer has a certificate: one of those who say so is asked for it at a time (`CertificatePull`)
answer    a peer that asks, from memory or, through the shell, from the ledger
"""

from __future__ import annotations

from collections.abc import Collection

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.announce import CertificatePull
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.effects import Serve
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.height import Height
from spes_p2p.protocol.inbox import Inbox
from spes_p2p.protocol.messages import Decided, TipAsk
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.params import CERTIFICATES_PER_ANSWER
from spes_p2p.protocol.standing import answer_tip
from spes_p2p.protocol.wire import NO_DIGEST

_KEEP_CERTIFICATES = 64
"""Certificates kept in memory to answer those who are behind; older ones are served from the ledger."""


class Tidings:
    """What one peer knows of its own chain and of who is ahead of it."""

    def __init__(self, outbox: Outbox, inbox: Inbox, head: Head, now_ms: int) -> None:
        self.known_peers: tuple[PeerId, ...] = ()
        self.behind = False
        """Messages of later rounds could not be kept: there is more to ask for."""
        self._outbox = outbox
        self._inbox = inbox
        self._resend_ms = head.run.config.protocol.resend_ms
        self._certificates: dict[int, bytes] = {}
        self._chain = {known.round: known.hash for known in (head.last_final, *head.branch)}
        """Hashes of the newest certificates of this peer's chain, by round."""
        self._pull = CertificatePull(self._resend_ms)
        self._ask_at_ms = now_ms
        self._turn = 0

    # --- the chain ---------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """A new round is open: nobody has spoken of its certificate."""
        self._pull = CertificatePull(self._resend_ms)

    def adopted(self, before: Head, lost: Collection[Digest], head: Head, encoded: bytes) -> None:
        """A certificate is the tip now, instead of `before`; `lost`: as in `abandon`."""
        self.abandon(before, lost)
        self._certificates[head.round], self._chain[head.round] = encoded, head.hash
        self._certificates.pop(head.round - _KEEP_CERTIFICATES, None)
        self._chain.pop(head.round - _KEEP_CERTIFICATES, None)

    def abandon(self, head: Head, lost: Collection[Digest]) -> None:
        """These certificates on the branch of `head` are left, and so are all after the first of them."""
        first = min((known.round for known in head.branch if known.hash in lost), default=head.round + 1)
        for number in [number for number in self._chain if number >= first]:
            del self._chain[number]
            self._certificates.pop(number, None)

    def deadline_ms(self) -> int:
        """When somebody is asked next."""
        due_ms = self._pull.deadline_ms()
        return self._ask_at_ms if due_ms is None else min(due_ms, self._ask_at_ms)

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, context: Context, height: Height, peer: PeerId) -> None:
        """Ask a peer for its tip: from this peer's own on, or for the rest of a branch that it has begun to show."""
        head = height.shown.get(peer, context.terms.head)
        ask = TipAsk(head.epoch, head.round + 1, head.last_final.round, head.hash)
        context.emit(self._outbox.once(peer, encode(ask)))

    def ask_voters(self, context: Context, height: Height) -> None:
        """Ask all voters for their tips: a quorum can be reached again."""
        for voter in context.terms.all_voters:
            if voter != context.me:
                self.ask(context, height, voter)

    def seek(self, context: Context, height: Height, base: Head) -> None:
        """Ask for what follows on a certificate: it was adopted before a restart and left, only its head is here."""
        for voter in context.terms.all_voters:
            if voter != context.me:
                height.ask_from(voter, base)
                self.ask_sometimes(context, height, voter)

    def ask_sometimes(self, context: Context, height: Height, peer: PeerId) -> None:
        """Ask a peer that may have what is lacking here, once per resend."""
        if self._inbox.may_ask(peer, context.now_ms, self._resend_ms):
            self.ask(context, height, peer)

    def ask_around(self, open_round: OpenRound, height: Height) -> None:
        """Ask a few peers for their tips: often while not a member or not ready, else only in a round that drags on."""
        context = open_round.context
        self.pull(context, height)
        if context.now_ms < self._ask_at_ms:
            return
        protocol = context.terms.config.protocol
        settled = context.is_member and context.state_ready
        if settled and not open_round.drags_on():
            self._ask_at_ms = context.now_ms + protocol.view_timeout(3)
            return
        self._ask_at_ms = context.now_ms + (protocol.view_timeout(3) if settled else protocol.resend_ms)
        peers = sorted({*context.terms.members, *self.known_peers} - {context.me})
        for _ in range(min(1 if settled else 3, len(peers))):
            self.ask(context, height, peers[self._turn % len(peers)])
            self._turn += 1

    def told(self, context: Context, height: Height, sender: PeerId, decided: Decided) -> None:
        """A peer has a certificate: of the open round or a later one, or of another chain."""
        terms = context.terms
        known = dict(terms.head.recent).get(decided.round)
        if decided.round >= terms.round:
            self.behind |= decided.round > terms.round
            self.ahead(context, height, sender)
        elif decided.round >= terms.height and decided.certificate not in (known, NO_DIGEST):
            self.ask_sometimes(context, height, sender)

    def ahead(self, context: Context, height: Height, peer: PeerId) -> None:
        """A peer is past this round: it has the certificate, if it tells the truth."""
        may_decide = context.is_voter and not self.behind
        is_member = peer in context.terms.member_set
        self._pull.told(peer, context.now_ms, is_member=is_member, may_decide=may_decide)
        self.pull(context, height)

    def pull(self, context: Context, height: Height) -> None:
        """Ask the next of those who are ahead, if it is time."""
        source = self._pull.next(context.now_ms)
        if source is not None:
            self.ask(context, height, source)

    # --- telling -----------------------------------------------------------------------------------------------------

    def announce(self, context: Context, peer: PeerId, number: int) -> None:
        """Tell a peer that is behind of the certificate of a round."""
        if self._inbox.may_announce(peer, number, context.now_ms, self._resend_ms):
            head = context.terms.head
            identity = dict(head.recent).get(number, NO_DIGEST)
            context.send_once([peer], Decided(head.epoch, number, identity))

    def answer(self, open_round: OpenRound, height: Height, sender: PeerId, ask: TipAsk) -> None:
        """Send a peer what it lacks."""
        context = open_round.context
        now_ms, pause_ms = context.now_ms, self._resend_ms // 2
        answer = answer_tip(context.terms.head, ask, self._chain)
        for number in answer.certificates[:CERTIFICATES_PER_ANSWER]:
            if self._inbox.may_answer(sender, number, now_ms, pause_ms):
                self._send_certificate(context, sender, number)
        if answer.everything and self._inbox.may_answer(sender, context.terms.round, now_ms, pause_ms):
            for data in open_round.everything(sender):
                context.emit(self._outbox.once(sender, data))
        if answer.asks_back:
            self.ask_sometimes(context, height, sender)

    def _send_certificate(self, context: Context, peer: PeerId, number: int) -> None:
        encoded = self._certificates.get(number)
        if encoded is not None:
            context.emit(self._outbox.once(peer, encoded))
        else:
            context.emit(Serve(to=peer, round=number))
