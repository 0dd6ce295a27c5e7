"""One round over several ballots: what one of them knew goes on to the next (docs/protocol.md, section 9)."""

from __future__ import annotations

from contextlib import suppress

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.codec import receipt_hash, statement_hash
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.stash import Stash


def stash_of(open_round: OpenRound) -> Stash:
    """What is known of this round on this tip, for another ballot of it."""
    updates = open_round.updates
    found = Stash.after(open_round.inherited, open_round.context.terms.head.hash)
    found.statements.update(updates.by_hash)
    found.receipts.update(updates.receipts)
    found.receipts.update({receipt_hash(receipt): receipt for receipt in updates.spare_receipts.values()})
    found.cuts.update({known.hash: known.cut for known in open_round.cuts.known.values()})
    found.digests.update({statement_hash(signed): signed for signed in open_round.parts.everything()})
    return found


def inherit(open_round: OpenRound, stash: Stash) -> None:
    """Take over what another ballot of this round on this tip knew; what does not hold in this one is kept for the
    next."""
    open_round.inherited = stash
    for held in stash.statements.values():
        if held.hash not in open_round.updates.by_hash:
            with suppress(RemoteProtocolError):
                open_round.carry(held)
    for receipt in stash.receipts.values():
        open_round.updates.add_other_receipt(receipt)
    for signed in stash.digests.values():
        with suppress(RemoteProtocolError):
            open_round.parts.add(signed)
    for cut in stash.cuts.values():
        open_round.cuts.learn(cut, ())


def resume(open_round: OpenRound, before: OpenRound) -> None:
    """Go on with the same round on the same tip after a change of the ballot."""
    mine, old = open_round.context, before.context
    mine.state_ready, mine.opened_at_ms = old.state_ready, old.opened_at_ms
    mine.held |= old.held
    open_round.will_train, open_round.training = before.will_train, before.training
    open_round.training_ended_at_ms, open_round.stop_sent = before.training_ended_at_ms, before.stop_sent
