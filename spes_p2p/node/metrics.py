"""A snapshot as Prometheus metrics, in the text exposition format 0.0.4.

Names are `spes_<what>_<unit>`, counters end in `_total`. Rates and averages are Prometheus' business: what only grows
is a counter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spes_p2p.node.snapshot import PAUSE, LimitsView, NodeSnapshot

HOLDING = ("monthly", "hours", "idle_only", "pause_on_battery")
"""Limits that may hold training."""
LIMITS = ("upload", "download", *HOLDING, "gpu_share", "gpu_power")
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
    yield from _limits(snapshot.limits)
    yield from _holds(snapshot)
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


def _limits(limits: LimitsView) -> Iterator[Metric]:
    """A limit that is not set has no value, only its line in `spes_limit_set`."""
    is_set = {limit.name for limit in limits.limits}
    for name in LIMITS:
        yield Metric("spes_limit_set", "gauge", "1: there is such a limit.", name in is_set, (("limit", name),))
    figures = limits.figures
    for name, help_text, value in (
        ("upload_bytes_per_second", "Most that may leave.", figures.upload_bytes_per_s),
        ("download_bytes_per_second", "Most that may arrive.", figures.download_bytes_per_s),
        ("month_bytes", "Most of a calendar month, both directions.", figures.month_bytes),
        ("gpu_share_ratio", "Most of the trainer's time.", figures.gpu_share),
        ("gpu_power_watts", "Most power of each GPU.", figures.gpu_power_w),
    ):
        if value is not None:
            yield Metric(f"spes_limit_{name}", "gauge", help_text, value)
    yield Metric("spes_month_bytes", "gauge", "Traffic of this calendar month so far.", figures.month_used_bytes)


def _holds(snapshot: NodeSnapshot) -> Iterator[Metric]:
    """Reasons by the name of the limit, since their words change with it; what is neither says itself."""
    reasons = snapshot.pause.reasons if snapshot.pause is not None else ()
    held = {limit.name for limit in snapshot.limits.limits if limit.holds} | ({PAUSE} & set(reasons))
    others = [reason for reason in reasons if reason != PAUSE and reason not in snapshot.limits.holds]
    for reason in (PAUSE, *HOLDING, *others):
        value = reason in held or reason in others
        yield Metric("spes_training_held", "gauge", "1: training is held for this.", value, (("reason", reason),))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
