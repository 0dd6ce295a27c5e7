"""The demo's figures: what the peers did, read from their ledgers and their last snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spes_p2p.errors import SpesError
from spes_p2p.node.history import RoundRecord
from spes_p2p.node.snapshot import NodeSnapshot


def swarm_figures(
    num_rounds: int, ledgers: Mapping[int, Sequence[RoundRecord]], snapshots: Mapping[int, NodeSnapshot]
) -> dict[str, Any]:
    """One JSON object of figures. `ledgers` and `snapshots` are by peer number.

    Raises SpesError if the ledgers do not reach the last round, or do not say the same.
    """
    histories = {peer: [record for record in ledger if record.round >= 1] for peer, ledger in ledgers.items()}
    common = min(len(history) for history in histories.values())
    history = next(iter(histories.values()))[:common]
    if common < num_rounds:
        raise SpesError(f"a ledger ends with round {common} of {num_rounds}")
    curve = dict(curve_point for view in snapshots.values() for curve_point in view.learning.val_curve)
    last = history[-1]
    return {
        "rounds_certified": sum(1 for record in history if record.final),
        "tentative": sum(1 for record in history if not record.final),
        "val_loss_first": curve[min(curve)],
        "val_loss_last": curve[max(curve)],
        "psi_digest_equal": _all_equal([[record.psi_digest for record in one[:common]] for one in histories.values()]),
        "ledgers_equal": _all_equal([[_agreed(record) for record in one[:common]] for one in histories.values()]),
        "owners": {str(shard): _owner(last.owners[shard]) for shard in sorted(last.owners)},
        "aggregators_used": sum(1 for view in snapshots.values() if view.counters.parts_aggregated > 0),
        "leaders_used": len({record.leader for record in history}),
        "merges_applied": sum(1 for record in history if record.merge_alpha > 0),
        "updates_included": sum(record.updates for record in history),
        "bytes_sent": sum(view.network.bytes_sent for view in snapshots.values()),
        "bytes_received": sum(view.network.bytes_received for view in snapshots.values()),
        "tokens_trained": sum(record.tokens for record in history),
    }


def _agreed(record: RoundRecord) -> RoundRecord:
    """The record without what stands outside a certificate's hash: peers may hold the same body from two views."""
    return dataclasses.replace(record, view=0, leader="")


def _owner(owners: Sequence[str]) -> str | list[str] | None:
    """A peer id; several for a co-owned shard, none for an orphan."""
    return owners[0] if len(owners) == 1 else list(owners) or None


def _all_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)
