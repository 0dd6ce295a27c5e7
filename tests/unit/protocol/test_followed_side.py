"""Which ballot a member without a vote takes part in."""

from dataclasses import replace

import pytest

from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import bitmap, encode, sign
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Side
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.state import RosterRow, State
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.protocol_cases import identities, owned_head
from spes_p2p.testing.swarm import identity_of

MEMBER = identity_of("member")


class Follower:
    """A member without a vote in round 2 of a run with so many voters."""

    def __init__(self, num_voters: int) -> None:
        self.voters = identities(num_voters)
        self.head = _with_member(owned_head(self.voters))
        self.now_ms = 0
        self.machine = RoundMachine(self.head, MEMBER, verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
        self.machine.start(0)

    def told(self, voter: int, *side: int, tip: bytes | None = None) -> list[int]:
        """A voter says which side it is with (none: the final ballot); the side whose ballot is open here then."""
        marks = bitmap(set(side), len(self.voters)) if side else b""
        heard, head = bitmap(set(range(len(self.voters))), len(self.voters)), self.head
        said = Side(head.run.run_id, head.epoch, 2, 2, head.hash if tip is None else tip, heard, marks, False)
        sender = self.voters[voter]
        self.now_ms += 1
        self.machine.handle(fx.Received(sender=sender.peer_id, data=encode(sign(sender, said))), self.now_ms)
        ids = [peer.peer_id for peer in self.voters]
        return [ids.index(peer) for peer in self.machine.terms.side]


def _with_member(head: Head) -> Head:
    rows = (*head.state.roster, RosterRow(MEMBER.peer_id, 0, 0, 0, 1, None))
    state = State(tuple(sorted(rows, key=lambda row: row.peer)), head.state.leases, head.state.shards)
    return replace(head, state=state, present=head.present | {PeerId(MEMBER.peer_id)})


def test_one_voter_of_four_takes_no_member_into_a_ballot_and_two_do() -> None:
    follower = Follower(4)
    assert follower.told(0, 0, 1) == []
    assert follower.told(0, 0, 2) == []
    assert follower.told(1, 0, 1) == []  # the first has changed its mind
    assert follower.told(0, 0, 1) == [0, 1]


def test_one_voter_of_four_takes_no_member_out_of_a_ballot_and_two_do() -> None:
    follower = Follower(4)
    follower.told(0, 0, 1)
    assert follower.told(1, 0, 1) == [0, 1]
    assert follower.told(0) == [0, 1]
    assert follower.told(0, 0, 2) == [0, 1]
    assert follower.told(2) == [0, 1]  # not of this side
    assert follower.told(1, tip=NO_DIGEST) == [0, 1]
    assert follower.told(1) == []


def test_where_there_is_no_liar_one_voter_is_enough() -> None:
    follower = Follower(3)
    assert follower.told(0, 0, 1) == [0, 1]
    assert follower.told(1, 1, 2) == [1, 2]
    assert follower.told(0) == [1, 2]
    assert follower.told(2) == []


def test_a_side_that_may_make_nothing_is_refused() -> None:
    follower = Follower(4)
    with pytest.raises(RemoteProtocolError, match="may make no certificate"):
        follower.told(0, 0)
    with pytest.raises(RemoteProtocolError, match="may make no certificate"):
        follower.told(0, 1, 2)
