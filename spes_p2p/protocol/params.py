"""Numbers of the protocol and the thresholds that follow from them, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config import ProtocolConfig

MAX_VOTERS = 128
"""A certificate carries one signature per voter of the quorum; more would cost more than it protects."""

STATEMENT_ROUNDS = 2
"""`join`, `leave` and `claim` hold for the round they name and this many more."""

LATE_ROUNDS = 2
"""A late update is accepted up to this many rounds after its own, with weight 0.5 per round."""

SILENT_ROUNDS = 2
"""A member without an item in this many successive final cuts is out of the roster."""

BUDGET_RESENDS = 3
"""Part of the transfer budget that does not depend on bytes, in resends."""

MAX_SQUARED_NORM = 1e60
"""Largest squared norm a manifest may state: no fp32 delta that could be of use comes near, and sums stay finite."""

MAX_VIEWS_AHEAD = 64
"""Votes, cuts and proposals of views further ahead are not kept: a voter that far behind follows the views first."""

MIN_ELIGIBLE = 3
"""Voters are filled up with members to this number for acknowledging and aggregating."""

MAX_MEMBERS_WHO_HEAR_ALL = 64
"""In a larger run only the eligible get everybody's statements: else a round would cost members x members messages."""

MIN_BYZANTINE_VOTERS = 4
"""Fewer voters tolerate no fault, so the vote stays with the founders until this many result."""
MAX_JOINERS = 64
"""Peers outside the roster whose joins are kept in a round, and that a cut has to name at most."""

MAX_PEERS_REMEMBERED = 4096
"""Peers, strangers included, whose questions and answers are remembered."""
CERTIFICATES_PER_ANSWER = 8
"""Sent for one `TipAsk`: the tentative ones before a final one belong together."""


RECOVERY_MS = 600_000
"""A holder of the recovery key makes a new epoch by itself after this long without a final certificate in sight."""

MAX_PARKED_PER_PEER = 256
MAX_PARKED_BYTES_PER_PEER = 4 << 20
"""Messages of one peer that belong to another ballot of the open round, kept for when this peer takes part in it."""


def faults(num_voters: int) -> int:
    """f: the most Byzantine voters that n tolerate."""
    return (num_voters - 1) // 3


def quorum(num_voters: int) -> int:
    """q: any two sets of q voters share an honest one."""
    return 2 * num_voters // 3 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """Bytes of a run's pieces, which follow from its model and codecs."""

    expert_blob_bytes: int
    psi_piece_bytes: int
    """The encoded delta of one part (the largest)."""
    part_result_bytes: int
    num_parts: int
    num_shards: int


def replicas(config: ProtocolConfig, num_voters: int, num_eligible: int) -> int:
    """Equal digests needed per part; never more than there are aggregators."""
    wanted = config.replicas
    if wanted is None:
        wanted = faults(num_voters) + 1
        if config.admission != "open":
            wanted = min(wanted, 2)
    return max(1, min(wanted, num_eligible))


def expert_acks(num_voters: int, num_eligible: int) -> int:
    """Acks of others that an expert blob needs: one honest holder among them."""
    return max(0, min(faults(num_voters) + 1, num_eligible - 1))


def psi_acks(num_replicas: int, num_eligible: int) -> int:
    """Acks of others that a psi piece needs: the aggregators of its part."""
    return max(0, min(num_replicas, num_eligible - 1))


def transfer_budget_ms(
    config: ProtocolConfig, sizes: PieceSizes, *, num_members: int, num_eligible: int, num_replicas: int
) -> int:
    """T: time for the slowest line that keeps up to move a round's blobs, and for BUDGET_RESENDS silent peers.

    Each `resend` without a receipt brings one more acker or aggregator within reach, so a dead one costs that much
    even if the blobs are small (docs/protocol.md, section 3).
    """
    share = -(-sizes.num_parts * min(num_eligible, num_replicas + 1) // max(1, num_eligible))
    total_bytes = (
        sizes.num_shards * sizes.expert_blob_bytes
        + num_members * share * sizes.psi_piece_bytes
        + sizes.num_parts * sizes.part_result_bytes
    )
    return -(-total_bytes * 1000 // config.min_rate_bytes_per_s) + BUDGET_RESENDS * config.resend_ms
