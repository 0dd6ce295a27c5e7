"""A snapshot as Prometheus metrics, in the text exposition format 0.0.4.

Names are `spes_<what>_<unit>`, counters end in `_total`. Rates and averages are Prometheus' business: what only grows
is a counter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spes_p2p.node.snapshot import NodeSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of this node and its value."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def exposition(metrics: Iterator[Metric]) -> str:
    """The text that Prometheus reads. Metrics of one name must follow each other."""
    lines, named = [], ""
    for metric in metrics:
        if metric.name != named:
            named = metric.name
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in metric.labels)
        lines.append(f"{metric.name}{f'{{{labels}}}' if labels else ''} {_number(metric.value)}")
    return "\n".join(lines) + "\n"


def metrics_of(snapshot: NodeSnapshot) -> Iterator[Metric]:
    """What a volunteer may want a graph or an alarm of."""
    about = (
        ("version", snapshot.version), ("run", snapshot.run_name), ("run_id", snapshot.run_id), ("peer", snapshot.peer)
    )  # fmt: skip
    yield Metric("spes_node_info", "gauge", "Constant 1, with what this node is as labels.", 1, about)
    yield Metric("spes_up_seconds", "gauge", "Since the node started.", snapshot.started_ms_ago / 1000)
    states = ("member", "voter", "leaving", "paused")
    for state in states:
        value = bool(getattr(snapshot, state))
        yield Metric("spes_state", "gauge", "1: the node is so.", value, (("state", state),))
    yield Metric("spes_round", "gauge", "The open round.", snapshot.round.number)
    yield Metric(
        "spes_certified_round", "gauge", "Newest certified round, tentative ones too.", snapshot.certified_round
    )
    yield Metric("spes_final_round", "gauge", "Newest finally certified round.", snapshot.final_round)
    yield Metric("spes_epoch", "gauge", "Recoveries made in this run.", snapshot.epoch)
    yield Metric("spes_waiting", "gauge", "1: the run cannot go on.", bool(snapshot.waiting))
    mine = sum(view.mine for view in snapshot.shards)
    orphans = sum(not view.owners for view in snapshot.shards)
    for owner, count in (("me", mine), ("nobody", orphans), ("others", len(snapshot.shards) - mine - orphans)):
        yield Metric("spes_shards", "gauge", "Expert shards by owner.", count, (("owner", owner),))
    yield from _learning(snapshot)
    yield from _network(snapshot)
    yield Metric("spes_memory_bytes", "gauge", "Resident memory of node and trainer.", snapshot.machine.memory_bytes)
    yield Metric(
        "spes_trainer_restarts_total", "counter", "Trainer processes that died.", snapshot.machine.trainer_restarts
    )
    counters = snapshot.counters
    for field in counters.__struct_fields__:
        words = field.replace("_", " ")
        yield Metric(f"spes_{field}_total", "counter", f"Since the start: {words}.", getattr(counters, field))


def _learning(snapshot: NodeSnapshot) -> Iterator[Metric]:
    learning = snapshot.learning
    yield Metric("spes_tokens_certified_total", "counter", "Tokens of this node that count.", learning.tokens_total)
    yield Metric("spes_tokens_per_second", "gauge", "Training speed.", learning.tokens_per_s)
    if learning.loss_curve:
        yield Metric("spes_training_loss_nats", "gauge", "Per token, last step.", learning.loss_curve[-1][1])
    if learning.val_curve:
        yield Metric("spes_held_out_loss_nats", "gauge", "Per byte, of the run's state.", learning.val_curve[-1][1])


def _network(snapshot: NodeSnapshot) -> Iterator[Metric]:
    network = snapshot.network
    for direction, value in (("sent", network.bytes_sent), ("received", network.bytes_received)):
        name = "spes_network_bytes_total"
        yield Metric(name, "counter", "Traffic since the start.", value, (("direction", direction),))
    connected = sum(peer.connected and not peer.me for peer in network.peers)
    yield Metric("spes_members", "gauge", "Members of the run.", len(network.peers))
    yield Metric("spes_members_connected", "gauge", "Members with a line to this node.", connected)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
