"""What was gathered, as lines for people and values for programs, each with how it was obtained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from spes_p2p.client.estimate.gather import Facts
from spes_p2p.client.output import count_text, duration_text
from spes_p2p.node.budgets.keeping_up import LINE_SHARE
from spes_p2p.node.budgets.limits import rate_text, size_text
from spes_p2p.node.outlook import RoundTime, deadline, num_vacant, pace_of, round_time
from spes_p2p.node.traffic import round_traffic, state_bytes
from spes_p2p.units import bytes_text

How = Literal["measured now", "from certificates", "reckoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the estimate."""

    name: str
    text: str
    how: How
    values: dict[str, Any]

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.name:<9} {self.text} [{self.how}]"


def figures(facts: Facts) -> list[Figure]:
    """The estimate."""
    steps = facts.steps
    inner_steps = facts.look.head.inner_steps
    training_s = None if steps is None else inner_steps * steps.mean_s
    rounds = round_time(facts.config, facts.durations_s, training_s, facts.demand.transfer_s)
    found = [_run(facts), _pace(facts), _memory(facts), _steps(facts), _rounds(facts, rounds)]
    found += _traffic(facts, rounds)
    found += _limits(facts)
    found.append(_deadline(facts, rounds))
    return found


def _run(facts: Facts) -> Figure:
    head = facts.look.head
    members, shards, vacant = len(head.state.members), len(head.state.leases), num_vacant(head)
    text = (
        f"{facts.config.name}: {count_text(members, 'member')}, {count_text(shards, 'shard')}, {vacant} of them vacant"
    )
    return Figure(
        name="run",
        text=f"{text}, certified up to round {head.round:,}",
        how="from certificates",
        values={"round": head.round, "members": members, "shards": shards, "vacant_shards": vacant},
    )


def _pace(facts: Facts) -> Figure:
    pace = pace_of(facts.config, facts.look.head, facts.look.bodies)
    text = "no round to look at yet"
    if pace.num_rounds:
        text = (
            f"in the last {count_text(pace.num_rounds, 'round')}, {pace.num_complete} of "
            f"{count_text(pace.num_updates, 'update')} had all their inner steps"
        )
    values = {"rounds": pace.num_rounds, "updates": pace.num_updates, "complete_updates": pace.num_complete}
    return Figure(name="pace", text=text, how="from certificates", values=values)


def _memory(facts: Facts) -> Figure:
    need, most = facts.need, facts.most
    if need is None or most is None:
        values: dict[str, Any] = {"fits": False, "room_bytes": facts.room.device_bytes}
        return Figure(name="memory", text=" ".join(facts.refusal.splitlines()), how="reckoned", values=values)
    peak = need.device.peak_bytes
    text = (
        f"{bytes_text(peak)} {facts.room.of} with {count_text(need.num_owned, 'shard')}, in {need.plan}; "
        f"there is room for {most.num_owned} of {facts.config.num_shards}"
    )
    host = need.host.peak_bytes if need.host is not None else None
    if host is not None:
        text += f"; and {bytes_text(host)} of main memory"
    values = {
        "fits": True,
        "device_bytes": peak,
        "host_bytes": host,
        "room_bytes": facts.room.device_bytes,
        "shards": need.num_owned,
        "most_shards": most.num_owned,
        "micro_sequences": need.plan.micro_sequences,
        "checkpoint": need.plan.checkpoint,
    }
    return Figure(name="memory", text=text, how="reckoned", values=values)


def _steps(facts: Facts) -> Figure:
    steps, tokens = facts.steps, facts.config.training.batch_tokens
    if steps is None:
        return Figure(name="steps", text=f"not known: {facts.unmeasured}", how="measured now", values={})
    rate, num = 1 / steps.mean_s, len(steps.seconds)
    text = f"{rate:.2f} inner steps a second on {facts.wishes.node.device}, {rate * tokens:,.0f} tokens/s ({num} steps)"
    values = {"steps_per_s": rate, "tokens_per_s": rate * tokens, "deviation_s": steps.deviation_s, "steps": num}
    return Figure(name="steps", text=text, how="measured now", values=values)


def _rounds(facts: Facts, rounds: RoundTime) -> Figure:
    text = f"{rounds.rounds_per_hour:,.1f} an hour, {duration_text(rounds.seconds * 1000)} each: {rounds.how}"
    return Figure(
        name="rounds",
        text=text,
        how="measured now" if rounds.watched else "reckoned",
        values={"rounds_per_hour": rounds.rounds_per_hour, "round_s": rounds.seconds, "watched": rounds.watched},
    )


def _traffic(facts: Facts, rounds: RoundTime) -> Iterator[Figure]:
    sizes = facts.look.head.run.sizes
    num_owned = facts.need.num_owned if facts.need is not None else 1
    traffic = round_traffic(sizes, facts.demand.crowd, num_owned)
    each_way, a_day = traffic.each_way_bytes, traffic.each_way_bytes * rounds.rounds_per_day
    text = (
        f"{bytes_text(a_day)} a day down and about as much up; {bytes_text(each_way)} a round: experts "
        f"{bytes_text(traffic.experts_bytes)}, deltas {bytes_text(traffic.pieces_bytes)}, "
        f"results {bytes_text(traffic.results_bytes)}"
    )
    values: dict[str, Any] = {
        "down_gb_per_day": a_day / 1e9,
        "up_gb_per_day": a_day / 1e9,
        "round_bytes_each_way": each_way,
    }
    yield Figure(name="traffic", text=text, how="reckoned", values=values)
    first = state_bytes(sizes)
    text = f"{bytes_text(first)} to load once, and a few times as much on disk"
    yield Figure(name="state", text=text, how="reckoned", values={"state_bytes": first})


def _limits(facts: Facts) -> Iterator[Figure]:
    """What a join would make of the limits, and the sums behind it; nothing without limits."""
    limits, judged, demand = facts.wishes.limits, facts.judged, facts.demand
    if limits.upload is not None:
        values: dict[str, Any] = {
            "upload_bytes_per_s": limits.upload,
            "update_bytes": judged.publish_bytes,
            "update_s": judged.publish_s,
            "budget_s": demand.transfer_s,
            "needed_bytes_per_s": judged.publish_bytes / LINE_SHARE / demand.transfer_s,
        }
        text = (
            f"{rate_text(limits.upload)}: an update with {count_text(judged.capacity, 'shard')}, "
            f"{size_text(judged.publish_bytes)}, takes {judged.publish_s:.0f} s; there are "
            f"{demand.transfer_s:.0f} s for transfers"
        )
        yield Figure(name="upload", text=text, how="reckoned", values=values)
    if limits.download is not None:
        within_s = demand.round_s or demand.round_max_s + demand.transfer_s
        values = {
            "download_bytes_per_s": limits.download,
            "round_bytes": judged.load_bytes,
            "round_bytes_s": judged.load_s,
            "within_s": within_s,
            "needed_bytes_per_s": judged.load_bytes / LINE_SHARE / within_s,
        }
        text = (
            f"{rate_text(limits.download)}: what a round brings, {size_text(judged.load_bytes)}, takes "
            f"{judged.load_s:.0f} s; there are {within_s:.0f} s"
        )
        yield Figure(name="download", text=text, how="reckoned", values=values)
    if (limits.upload, limits.download, limits.gpu_share) == (None, None, None):
        return
    refusal = ". ".join(line.rstrip(".") for line in judged.refusal.splitlines())
    text = refusal or judged.note or "they cost nothing"
    if not judged.refusal:
        shards, steps = count_text(judged.capacity, "shard"), f"{judged.inner_steps:,} of {demand.inner_steps:,}"
        text += f": {shards} to offer, {steps} inner steps"
    values = {
        "enough": not judged.refusal,
        "shards": judged.capacity,
        "inner_steps": judged.inner_steps,
        "gpu_share": facts.wishes.limits.time_share,
        "note": judged.why,
    }
    yield Figure(name="limits", text=text, how="reckoned", values=values)


def _deadline(facts: Facts, rounds: RoundTime) -> Figure:
    inner_steps, steps = facts.look.head.inner_steps, facts.steps
    if steps is None:
        text = f"not known: {facts.unmeasured}"
        return Figure(name="deadline", text=text, how="reckoned", values={"chance": None, "inner_steps": inner_steps})
    share, judged = facts.wishes.limits.time_share, facts.judged
    rested_s = (steps.mean_s / share, steps.deviation_s / share)
    found = deadline(facts.config, inner_steps, rested_s, rounds, judged.shortened_s)
    chance, more = found.chance, ""
    at_share = "" if share == 1.0 else f" at {share:.0%} of the time"
    if judged.refusal:
        chance, more = 0.0, ", but the line does not keep up"
    text = (
        f"{100 * chance:.0f} % to make all {inner_steps:,} steps in time: they take {found.training_s:.1f} s"
        f"{at_share}, and training ends after {found.limit_s:.1f} s ({found.why}){more}"
    )
    values = {
        "chance": chance,
        "inner_steps": inner_steps,
        "training_s": found.training_s,
        "limit_s": found.limit_s,
    }
    return Figure(name="deadline", text=text, how="reckoned", values=values)
