"""What one peer answers another that says where it stands: a comparison of two tips (docs/protocol.md, section 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.ids import Digest
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import TipAsk
from spes_p2p.protocol.wire import NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class TipAnswer:
    """What to send to a peer that asks."""

    certificates: range = range(0)
    """Rounds whose certificates, as they are on this peer's chain, it lacks."""
    everything: bool = False
    """It is on the same tip: all that is known of the open round."""
    asks_back: bool = False
    """It may have what this peer lacks."""


def answer_tip(head: Head, ask: TipAsk, chain: Mapping[int, Digest]) -> TipAnswer:
    """Compare the tip of `ask` with this peer's. `chain`: hashes of its newest certificates, by round.

    A peer whose tip is too old to be looked up is believed to be on this chain; if it is not, what it gets builds on
    nothing that it knows, and it asks again from its last final certificate on.
    """
    if (ask.epoch, ask.final_round) > (head.epoch, head.last_final.round):
        return TipAnswer(asks_back=True)
    if ask.tip == NO_DIGEST:
        return _by_round(head, ask.round)
    if ask.tip == head.hash:
        return TipAnswer(everything=True)
    if ask.round <= head.round and chain.get(ask.round - 1, ask.tip) == ask.tip:
        return TipAnswer(certificates=range(ask.round, head.round + 1))
    if ask.epoch == head.epoch and ask.final_round == head.last_final.round:
        # another branch from the same final certificate: each shows its own
        return TipAnswer(certificates=range(head.height, head.round + 1), asks_back=True)
    return TipAnswer(certificates=range(ask.final_round + 1, head.round + 1))


def _by_round(head: Head, round_number: int) -> TipAnswer:
    if round_number <= head.round:
        return TipAnswer(certificates=range(round_number, round_number + 1))
    return TipAnswer(everything=round_number == head.round + 1, asks_back=round_number > head.round + 1)
