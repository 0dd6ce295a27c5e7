"""Who is in the roster after a cut, and who votes: admission, silence, leaving, qualification.

Pure functions of (head, items of the cut). docs/protocol.md, sections 2 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.ids import PeerId, RunId
from spes_p2p.ports import Verifier
from spes_p2p.protocol import election
from spes_p2p.protocol.head import Run, Terms
from spes_p2p.protocol.messages import Join
from spes_p2p.protocol.params import MAX_VOTERS, MIN_BYZANTINE_VOTERS, SILENT_ROUNDS
from spes_p2p.protocol.state import RosterRow


def invite_payload(run: RunId, peer: PeerId) -> bytes:
    """What the invite key (tag `invite`) or a founder (tag `allow`) signs to admit a peer."""
    return run + peer


def admitted(run: Run, peer: PeerId, join: Join, check: Verifier) -> bool:
    """Whether the run's admission rule lets this peer in. Founders always may return."""
    manifest, config = run.manifest, run.config.protocol
    if peer in manifest.founders or config.admission == "open":
        return True
    payload = invite_payload(run.run_id, peer)
    if config.admission == "invited":
        return check(PeerId(manifest.invite_key), "invite", payload, join.invite_signature)
    return join.sponsor in manifest.founders and check(PeerId(join.sponsor), "allow", payload, join.sponsor_signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChange:
    """What a cut does to the roster, apart from updates."""

    present: frozenset[PeerId]
    """Peers with an item of any kind."""
    leaving: frozenset[PeerId]
    evicted: frozenset[PeerId]
    """Proven to have signed two statements for one slot."""
    joining: Mapping[PeerId, int]
    """Admitted newcomers, none of them a member before the cut, and their capacities; the evicted count for nothing."""
    capacities: Mapping[PeerId, int]
    """Capacities that members state in this cut."""
    accepted_bases: Mapping[PeerId, Sequence[int]]
    """Per member, the base rounds of its updates accepted in this cut, ascending."""


def next_roster(terms: Terms, change: RosterChange) -> tuple[RosterRow, ...]:
    """Rows after the cut, voters included, by peer id. A tentative cut changes neither members nor voters, and silence
    is counted in final cuts."""
    # A cut in which no member has an item (all have stopped, say) ends nobody's membership: else the run would end.
    anybody = bool(change.present & set(terms.members))
    rows = []
    for row in terms.head.state.roster:
        if row.peer in change.leaving or row.peer in change.evicted:
            continue
        last_item = row.last_item_round
        if row.peer in change.present and not terms.tentative:
            last_item = terms.round
        if anybody and not terms.tentative and terms.height - last_item >= SILENT_ROUNDS:
            continue
        bases = change.accepted_bases.get(row.peer, ())
        rows.append(
            RosterRow(
                row.peer,
                change.capacities.get(row.peer, row.capacity),
                row.accepted + len(bases),
                max((row.base_round, *bases)),
                last_item,
                row.voter_since,
            )
        )
    if terms.tentative:
        return tuple(rows)
    joining = ((peer, capacity) for peer, capacity in change.joining.items() if peer not in change.evicted)
    rows += [RosterRow(peer, capacity, 0, 0, terms.round, None) for peer, capacity in joining]
    return with_voters(terms, tuple(sorted(rows, key=lambda row: row.peer)))


def qualified(terms: Terms, row: RosterRow) -> bool:
    """Whether a member may vote and hold more than one shard: a founder, or enough accepted updates."""
    return row.peer in terms.head.run.founders or row.accepted >= terms.config.protocol.rounds_to_qualify


def with_voters(terms: Terms, rows: tuple[RosterRow, ...]) -> tuple[RosterRow, ...]:
    """The same rows with the voters of the next round."""
    voters = _next_voters(terms, rows)
    return tuple(
        RosterRow(
            row.peer,
            row.capacity,
            row.accepted,
            row.base_round,
            row.last_item_round,
            (row.voter_since if row.voter_since is not None else terms.round) if row.peer in voters else None,
        )
        for row in rows
    )


def _next_voters(terms: Terms, rows: tuple[RosterRow, ...]) -> frozenset[PeerId]:
    """Founders and qualified members from 4 on, growing slowly; below that the founders alone, or all who qualify."""
    candidates = [row.peer for row in rows if qualified(terms, row)]
    founders = frozenset(row.peer for row in rows if row.peer in terms.head.run.founders)
    current = {row.peer for row in rows if row.voter_since is not None}
    order = election.rank(terms.seed, "voter", candidates)
    chosen = [peer for peer in order if peer in current]
    chosen += [peer for peer in order if peer not in current][: _most_new_voters(terms, len(chosen))]
    if len(chosen) >= MIN_BYZANTINE_VOTERS:
        return frozenset(chosen[:MAX_VOTERS])
    return founders or frozenset(candidates)


def _most_new_voters(terms: Terms, num_staying: int) -> int:
    """A quarter of the voters, so that a crowd of newcomers cannot outvote those who let it in at once."""
    growth = max(1, len(terms.voters) // 4)
    if terms.config.protocol.admission == "open":
        return growth
    return max(growth, MIN_BYZANTINE_VOTERS - num_staying)
