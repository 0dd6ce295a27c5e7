"""The skip rule: who vouches for what, and how far a bisection goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from spes_p2p.crypto import verify
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import RunId
from spes_p2p.protocol.certificate import verify_checks
from spes_p2p.protocol.questions import Waypoint
from spes_p2p.protocol.skip import Skipping, anchor_of, head_at, judge, retrace, vouches
from spes_p2p.protocol.state import State, roster_root
from spes_p2p.testing.chains import MadeChain, made_chain
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config
from spes_p2p.testing.swarm import identity_of

CONFIG = quick_config()


def chain_of(num_voters: int, num_rounds: int, turnover_every: int = 0) -> MadeChain:
    chain = made_chain(num_voters, CONFIG, NUM_PARTS, turnover_every)
    chain.keep_heads = True
    return chain.grow(num_rounds)


CHAIN = chain_of(6, 40, turnover_every=4)
STEADY = chain_of(4, 30)
RUN = STEADY.genesis.run.run_id


def skip(chain: MadeChain, target: int) -> Skipping:
    skipping = Skipping(anchor_of(chain.genesis), target)
    while (wanted := skipping.wanted) is not None:
        verify_checks(skipping.take(chain.waypoint(wanted)).checks, verify)
    return skipping


def with_body(waypoint: Waypoint, **changes: object) -> Waypoint:
    """The same with a changed body under the same signatures."""
    body = structs.replace(waypoint.certificate.body, **changes)
    return structs.replace(waypoint, certificate=structs.replace(waypoint.certificate, body=body))


def refuses(waypoint: Waypoint, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        judge(RUN, 0, waypoint)


# --- one hop ---------------------------------------------------------------------------------------------------------


def test_trusted_voters_who_stay_vouch_for_any_later_certificate() -> None:
    skipping = skip(STEADY, 30)
    assert (skipping.num_asked, len(skipping.path)) == (1, 1)
    assert skipping.anchor == anchor_of(STEADY.head)


def test_the_head_after_a_skip_is_that_of_the_whole_chain() -> None:
    skipping = skip(STEADY, 30)
    assert head_at(STEADY.genesis.run, skipping.path[-1], STEADY.head.state) == STEADY.head


def test_a_skip_to_the_second_round_works_and_to_the_first_needs_none() -> None:
    assert skip(STEADY, 2).anchor == anchor_of(STEADY.heads[2])
    with pytest.raises(LocalProtocolError):
        Skipping(anchor_of(STEADY.head), 30)


@pytest.mark.parametrize(("num_trusted", "num_signing", "enough"), [(6, 2, False), (6, 3, True), (7, 2, False)])
def test_more_than_a_third_of_the_trusted_voters_is_needed_exactly_a_third_is_too_few(
    num_trusted: int, num_signing: int, enough: bool
) -> None:
    judged = judge(RUN, 0, STEADY.waypoint(20))
    strangers = [identity_of(f"stranger {number}").peer_id for number in range(num_trusted - num_signing)]
    voters = tuple(sorted([*sorted(judged.signers)[:num_signing], *strangers]))
    assert vouches(replace(anchor_of(STEADY.genesis), voters=voters), judged) is enough


def test_voters_who_did_not_sign_do_not_vouch() -> None:
    judged = judge(RUN, 0, STEADY.waypoint(20))
    (silent,) = set(STEADY.head.state.voters) - judged.signers
    assert not vouches(replace(anchor_of(STEADY.genesis), voters=(silent,)), judged)


# --- bisection -------------------------------------------------------------------------------------------------------


def test_a_roster_that_changed_wholly_is_crossed_in_hops() -> None:
    assert not set(CHAIN.genesis.state.voters) & set(CHAIN.head.state.voters)
    skipping = skip(CHAIN, 40)
    assert skipping.anchor == anchor_of(CHAIN.head)
    rounds = [waypoint.certificate.body.round for waypoint in skipping.path]
    assert rounds == [10, 20, 30, 40]
    assert skipping.num_asked == 4  # 40, 20, 10, 30: none of them twice


def test_the_stored_path_is_retraced_with_all_its_signatures() -> None:
    skipping = skip(CHAIN, 40)
    anchor, checks = retrace(anchor_of(CHAIN.genesis), tuple(skipping.path))
    assert anchor == anchor_of(CHAIN.head)
    assert len(checks) == 5 * len(skipping.path)
    verify_checks(checks, verify)


def test_a_path_with_a_waypoint_left_out_is_not_vouched_for() -> None:
    path = skip(CHAIN, 40).path
    with pytest.raises(RemoteProtocolError, match="round 40: not vouched for by round 0"):
        retrace(anchor_of(CHAIN.genesis), (path[-1],))
    with pytest.raises(RemoteProtocolError, match="round 10: not vouched for by round 20"):
        retrace(anchor_of(CHAIN.genesis), (path[0], path[1], path[0]))


def test_a_branch_of_liars_ends_where_trusted_voters_should_have_signed() -> None:
    liars = [identity_of(f"liar {number}") for number in range(4)]
    branch = chain_of(4, 10)
    pairs = zip(branch.head.state.roster, liars, strict=True)
    rows = tuple(sorted((structs.replace(row, peer=liar.peer_id) for row, liar in pairs), key=lambda row: row.peer))
    true = branch.head
    branch.head = replace(true, state=structs.replace(true.state, roster=rows))
    branch.peers |= {liar.peer_id: liar for liar in liars}
    branch.grow(10)
    skipping = Skipping(anchor_of(branch.genesis), 20)
    asked = []
    with pytest.raises(RemoteProtocolError, match=r"do not lead to the roots|does not match its root"):
        while (wanted := skipping.wanted) is not None:
            asked.append(wanted)
            verify_checks(skipping.take(branch.waypoint(wanted)).checks, verify)
    assert asked == [20, 10, 15, 12, 11]
    assert skipping.anchor == anchor_of(true)


def test_the_next_certificate_has_to_extend_the_anchor() -> None:
    other = chain_of(4, 3)
    other.heads[1] = other.genesis
    anchor = replace(anchor_of(other.heads[2]), hash=bytes(32))
    with pytest.raises(RemoteProtocolError, match="round 3 does not extend round 2"):
        vouches(anchor, judge(RUN, 0, STEADY.waypoint(3)))
    with pytest.raises(RemoteProtocolError, match="round 4 does not extend round 2"):
        vouches(anchor, judge(RUN, 0, STEADY.waypoint(4)))


# --- forgeries -------------------------------------------------------------------------------------------------------


def test_a_forged_roster_does_not_match_its_root() -> None:
    waypoint = STEADY.waypoint(20)
    liar = structs.replace(waypoint.roster[0], peer=identity_of("liar").peer_id)
    refuses(structs.replace(waypoint, roster=(liar, *waypoint.roster[1:])), "roster does not match its root")


def test_a_body_that_the_certificate_does_not_name_is_refused() -> None:
    waypoint = STEADY.waypoint(20)
    before = structs.replace(waypoint.before, roster_root=roster_root(waypoint.roster[:1]))
    forged = structs.replace(waypoint, before=before, roster=waypoint.roster[:1])
    refuses(forged, "do not follow each other")
    refuses(structs.replace(waypoint, before=STEADY.waypoint(19).before), "do not follow each other")


def test_a_body_that_nobody_signed_fails_its_checks() -> None:
    waypoint = STEADY.waypoint(20)
    forged = with_body(waypoint, tokens=7)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        verify_checks(judge(RUN, 0, forged).checks, verify)


def test_missing_signatures_are_no_quorum() -> None:
    waypoint = STEADY.waypoint(20)
    fewer = structs.replace(waypoint.certificate, voters=b"\x03", signatures=waypoint.certificate.signatures[:2])
    refuses(structs.replace(waypoint, certificate=fewer), "2 signatures where 3 make a quorum")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": 1}, "another run or epoch, or not final"),
        ({"run": RunId(bytes(32))}, "another run or epoch, or not final"),
        ({"final": False}, "another run or epoch, or not final"),
        ({"seed": bytes(32)}, "another seed"),
        ({"round": 21}, "do not follow each other"),
        ({"roster_root": bytes(32)}, "do not lead to the roots"),
    ],
)
def test_a_body_with_a_wrong_field_is_refused(changes: dict[str, object], why: str) -> None:
    refuses(with_body(STEADY.waypoint(20), **changes), why)


def test_merge_lists_without_a_merge_are_refused() -> None:
    waypoint = STEADY.waypoint(20)
    refuses(
        structs.replace(waypoint, certificate=structs.replace(waypoint.certificate, merge_lists=b"x")),
        "merge lists without a merge",
    )


def test_a_waypoint_of_another_round_than_the_wanted_one_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="another round than 30"):
        Skipping(anchor_of(STEADY.genesis), 30).take(STEADY.waypoint(29))


def test_tables_of_another_state_do_not_match_the_roots() -> None:
    for state in (
        STEADY.heads[29].state,
        State(STEADY.head.state.roster, STEADY.head.state.leases, STEADY.heads[29].state.shards),
    ):
        with pytest.raises(RemoteProtocolError, match="tables of round 30 do not match their roots"):
            head_at(STEADY.genesis.run, STEADY.waypoint(30), state)
