"""What became of this node's own updates, for people: kept in the ledger, settled by each certificate."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.node.settle import own_updates
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.wire import RefusalReason
from spes_p2p.storage.ledger import Ledger, OwnUpdate

KEPT = 64
"""Newest updates that are kept in memory."""
_ALL = 1 << 40
BRANCH_LOST = "branch lost"


class OwnUpdates:
    """Verdicts on the updates of one peer: `pending`, `accepted`, `accepted late`, `superseded`, `not included`,
    `branch lost`, or `refused: ` and why."""

    def __init__(self, peer: PeerId, head: Head, ledger: Ledger, notify: Callable[[str, str], None]) -> None:
        self._peer = peer
        self._ledger = ledger
        self._notify = notify
        self._pending: dict[int, int] = {}
        """Round -> tokens."""
        self._lost: set[int] = set()
        """Rounds of pending updates that a branch accepted which was left: they may still be accepted late."""
        self._refused: dict[int, str] = {}
        """Round of a pending update -> why members refused it; forgotten by a restart."""
        self._latest: dict[int, OwnUpdate] = {}
        """By round."""
        self.tokens_certified = 0
        """Tokens of the accepted updates."""
        for update in ledger.updates(_ALL):
            if update.verdict in ("pending", BRANCH_LOST):
                self._pending[update.round] = update.tokens
            if update.verdict == BRANCH_LOST:
                self._lost.add(update.round)
            self._enter(update)
        # a crash may have come between the certificate and the verdict
        self.branch_lost(head)
        self._judge(head)

    def latest(self, limit: int) -> tuple[OwnUpdate, ...]:
        """The newest updates, oldest first."""
        return tuple(self._latest[number] for number in sorted(self._latest)[-limit:])

    def published(self, round_number: int, tokens: int) -> None:
        """An update is on its way."""
        self._pending[round_number] = tokens
        self._lost.discard(round_number)
        self._record(round_number, "pending", tokens)

    def refused(self, round_number: int, reason: RefusalReason) -> None:
        """Members refused an update; a certificate tells whether it counts all the same."""
        if round_number in self._pending:
            self._refused[round_number] = _in_words(reason)

    def branch_lost(self, fork: Head) -> None:
        """The tentative certificates after `fork` were left: what they accepted is not accepted."""
        row = fork.state.row(self._peer)
        if row is None:
            return
        newest = max(row.base_round, fork.round - LATE_ROUNDS)
        for update in [update for update in self._latest.values() if update.round > newest]:
            if update.verdict.startswith("accepted"):
                self.tokens_certified -= update.tokens
                self._pending[update.round] = update.tokens
                self._lost.add(update.round)
                self._record(update.round, BRANCH_LOST, update.tokens)
                self._notify("warning", f"this node's update of round {update.round} was {BRANCH_LOST}")

    def adopted(self, before: Head, after: Head, body: Body) -> None:
        """A certificate may have settled some."""
        for reason in own_updates(before, body, self._peer).values():
            if reason is not None and reason is not RefusalReason.SUPERSEDED:
                self._notify(
                    "warning", f"round {after.round}: experts of this node's update were refused: {_in_words(reason)}"
                )
        self._judge(after, leaver=self._accepted_of_a_leaver(before, after, body))

    def _accepted_of_a_leaver(self, before: Head, after: Head, body: Body) -> int:
        """Round of the update that the certificate took which let this peer go; 0: it took none, or the peer stays."""
        if after.state.row(self._peer) is not None:
            return 0
        reasons = own_updates(before, body, self._peer)
        taken = {body.entries[place].tokens for place, why in reasons.items() if why is not RefusalReason.SUPERSEDED}
        # of a late update the body does not say which round it is of
        return max((number for number, tokens in self._pending.items() if tokens in taken), default=0)

    def _judge(self, head: Head, *, leaver: int = 0) -> None:
        row = head.state.row(self._peer)
        base = row.base_round if row is not None else leaver
        for number, tokens in sorted(self._pending.items()):
            verdict = ""
            if number == base:
                verdict = "accepted" if number == head.round else "accepted late"
            elif number < base:
                verdict = "superseded"
            elif number + LATE_ROUNDS <= head.round:
                verdict = "not included"
            if verdict:
                del self._pending[number]
                why = self._refused.pop(number, "")
                if number in self._lost and not verdict.startswith("accepted"):
                    self._lost.discard(number)
                    continue
                self._lost.discard(number)
                if why and not verdict.startswith("accepted"):
                    verdict = f"refused: {why}"
                self._record(number, verdict, tokens)
                if verdict != "accepted":
                    self._notify("warning", f"this node's update of round {number} was {verdict}")

    def _record(self, number: int, verdict: str, tokens: int) -> None:
        update = OwnUpdate(round=RoundNumber(number), verdict=verdict, tokens=tokens)
        self._ledger.record_update(update)
        self._enter(update)

    def _enter(self, update: OwnUpdate) -> None:
        self._latest[update.round] = update
        if len(self._latest) > KEPT:
            del self._latest[min(self._latest)]
        if update.verdict.startswith("accepted"):
            self.tokens_certified += update.tokens


def _in_words(reason: RefusalReason) -> str:
    return reason.name.lower().replace("_", " ")
