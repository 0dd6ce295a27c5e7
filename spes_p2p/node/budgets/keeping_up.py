"""Whether a line and a share of the machine keep up with a run, and with how many shards and inner steps. Pure.

`keep_up` is the one judgement: `join` takes its shards and steps from it, and `estimate` says what it would say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spes_p2p.config import Limits
from spes_p2p.node.budgets.limits import MIN_RATE_BYTES_PER_S, rate_text, size_text
from spes_p2p.node.outlook import crowd_with_one_more
from spes_p2p.node.traffic import Crowd, round_traffic
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.params import PieceSizes, expert_acks, transfer_budget_ms

LINE_SHARE = 0.9
MIN_STEPS = 0.25
"""Of H: with less, a peer gives the others more to wait for than to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of a peer."""

    sizes: PieceSizes
    crowd: Crowd
    """With this peer among them."""
    expert_acks: int
    """Of others, that an expert blob needs."""
    inner_steps: int
    """H."""
    transfer_s: float
    """T."""
    round_max_s: float
    round_s: float | None = None
    """How long rounds take now; None: not watched."""

    def publish_bytes(self, num_owned: int) -> int:
        """publish(k) of `keep_up`."""
        others = self.crowd.num_members - 1
        psi_bytes = self.sizes.num_parts * self.sizes.psi_piece_bytes
        experts_bytes = num_owned * self.sizes.expert_blob_bytes * min(others, self.expert_acks + 1)
        return experts_bytes + psi_bytes * min(others, self.crowd.num_replicas)

    def load_bytes(self, num_owned: int) -> int:
        """load(k) of `keep_up`."""
        return round_traffic(self.sizes, self.crowd, num_owned).each_way_bytes

    def others_train_s(self, step_s: float | None) -> float:
        """How long the others train, as far as is known. `step_s`: of one step on this machine with all its time."""
        if step_s is None:
            return self.round_max_s
        as_fast_s = self.inner_steps * step_s
        # long rounds say that others are slower; short ones say less: the first are, and those that end without updates
        watched_s = 0.0 if self.round_s is None else self.round_s - self.transfer_s
        return min(self.round_max_s, max(as_fast_s, watched_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a peer with limits can take on."""

    capacity: int
    """Shards to offer."""
    inner_steps: int
    """To make of H."""
    publish_bytes: int
    """publish(capacity)."""
    publish_s: float
    """Of the upload limit; 0.0 without one."""
    shortened_s: float
    """Training ends so much earlier than that of the others."""
    load_bytes: int
    """load of the fewest shards that were asked about."""
    load_s: float
    """Of the download limit; 0.0 without one."""
    refusal: str
    """Why the line does not keep up, with the numbers, and what would do; empty: it does."""
    note: str
    """What the limits cost, for people; empty: nothing."""

    @property
    def why(self) -> str:
        """The refusal without what would do, else the note."""
        return self.refusal.partition("\n")[0] or self.note


def demand_of(terms: Terms, *, is_member: bool) -> Demand:
    """What the round asks. A peer that is no member yet reckons with itself, as if it voted."""
    head, protocol, sizes = terms.head, terms.config.protocol, terms.head.run.sizes
    if is_member:
        crowd = Crowd(num_members=len(terms.members), num_eligible=len(terms.eligible), num_replicas=terms.replicas)
        acks = terms.expert_acks
    else:
        crowd = crowd_with_one_more(terms.config, head)
        acks = expert_acks(len(head.state.voters) + 1, crowd.num_eligible)
    budget_ms = transfer_budget_ms(
        protocol,
        sizes,
        num_members=crowd.num_members,
        num_eligible=crowd.num_eligible,
        num_replicas=crowd.num_replicas,
    )
    return Demand(
        sizes=sizes,
        crowd=crowd,
        expert_acks=acks,
        inner_steps=head.inner_steps,
        transfer_s=budget_ms / 1000,
        round_max_s=protocol.round_max_ms / 1000,
    )


def keep_up(demand: Demand, limits: Limits, offered: int, *, stated: bool, step_s: float | None = None) -> Judgement:
    """The most shards, at most `offered`, with which the line keeps up; fewer steps only where one shard is too many.

    `stated`: the owner asked for just that many (`--capacity`), which is kept or refused. `step_s`: how long an inner
    step takes on this machine with all its time; None: not known, then H fill the longest round.

    The sum is the one of node/traffic.py ("up is about equal to down": experts of others, pieces of psi, results), and
    of it what only this peer can give. With k of S shards among n members, e bytes of a shard's blob, p of all psi
    pieces, a acks of an expert blob, R replicas of a part, T the transfer budget (docs/protocol.md, section 3):

        load(k)     what a round brings; it must arrive within the longest round and T
        publish(k)  = k e min(n - 1, a + 1) + p min(n - 1, R); it must leave within T after the others have trained

    `a + 1`: as many copies as the receipt needs and one more, since not everybody waits until others have it too. A
    line may use LINE_SHARE of its limit for that; the rest is for messages. Where publishing takes longer than T,
    training ends earlier by just that. A share g of the time makes a step take step_s / g, so with E how long the
    others train (`Demand.others_train_s`) there remain

        steps = min(H, (E - (publish_s - T)) g / step_s)      if publish_s > T, else H until training is ended

    but never less than MIN_STEPS of H; a line that would leave less than that of the longest round is refused. What is
    refused depends on the run and the limits alone; how long steps and rounds take adds notes, as it becomes known.
    """
    least = offered if stated else 1
    capacity = _most_shards(demand, limits, least, offered)
    publish_bytes, load_bytes = demand.publish_bytes(capacity), demand.load_bytes(least)
    publish_s = 0.0 if limits.upload is None else publish_bytes / (limits.upload * LINE_SHARE)
    load_s = 0.0 if limits.download is None else load_bytes / (limits.download * LINE_SHARE)
    shortened_s = max(0.0, publish_s - demand.transfer_s)
    refusals = []
    if limits.download is not None and load_s > demand.round_max_s + demand.transfer_s:
        refusals.append(_too_slow_down(demand, limits.download, load_bytes))
    if limits.upload is not None and shortened_s > (1 - MIN_STEPS) * demand.round_max_s:
        refusals.append(_too_slow_up(demand, limits.upload, capacity))
    judgement = Judgement(
        capacity=capacity,
        inner_steps=_steps(demand, limits, shortened_s, step_s),
        publish_bytes=publish_bytes,
        publish_s=publish_s,
        shortened_s=shortened_s,
        load_bytes=load_bytes,
        load_s=load_s,
        refusal="\n".join(refusals),
        note="",
    )
    return replace(judgement, note="; ".join(_notes(demand, limits, judgement, offered, step_s)))


def _most_shards(demand: Demand, limits: Limits, least: int, offered: int) -> int:
    """With which an update leaves within T; `least` if none does."""
    if limits.upload is None:
        return offered
    most_bytes = limits.upload * LINE_SHARE * demand.transfer_s
    return next((owned for owned in range(offered, least, -1) if demand.publish_bytes(owned) <= most_bytes), least)


def _steps(demand: Demand, limits: Limits, shortened_s: float, step_s: float | None) -> int:
    """Inner steps to make of H."""
    if not shortened_s:
        return demand.inner_steps
    each_s = demand.round_max_s / demand.inner_steps if step_s is None else step_s / limits.time_share
    fit = math.floor((demand.others_train_s(step_s) - shortened_s) / each_s)
    return min(demand.inner_steps, max(1, math.floor(MIN_STEPS * demand.inner_steps), fit))


def _notes(  # without what is measured anew in each round: one text is told once
    demand: Demand, limits: Limits, judged: Judgement, offered: int, step_s: float | None
) -> Iterator[str]:
    if limits.upload is not None and judged.capacity < offered and not judged.shortened_s:
        yield (
            f"--upload {rate_text(limits.upload)}: {judged.capacity} of {_shards(offered)} are offered; an update with "
            f"them, {size_text(judged.publish_bytes)}, leaves within {demand.transfer_s:.0f} s"
        )
    if limits.upload is not None and judged.shortened_s:
        yield (
            f"--upload {rate_text(limits.upload)}: an update of {size_text(judged.publish_bytes)} takes "
            f"{judged.publish_s:.0f} s, more than the {demand.transfer_s:.0f} s after training; with "
            f"{_shards(judged.capacity)} training ends {judged.shortened_s:.0f} s earlier than the others', mostly "
            "with fewer steps"
        )
    if limits.download is not None and demand.round_s is not None and judged.load_s > demand.round_s:
        yield (
            f"--download {rate_text(limits.download)}: what a round brings, {size_text(judged.load_bytes)}, takes "
            f"{judged.load_s:.0f} s, longer than rounds take now: this node misses some of them"
        )
    training_s = demand.inner_steps * (step_s or 0.0) / limits.time_share
    if limits.gpu_share is not None and training_s > demand.round_max_s:
        yield (
            f"--gpu-share {limits.gpu_share:.0%}: not all {demand.inner_steps:,} inner steps fit into the "
            f"{demand.round_max_s:.0f} s that a round trains at most"
        )


def _too_slow_down(demand: Demand, download: int, load_bytes: int) -> str:
    within_s = demand.round_max_s + demand.transfer_s
    return (
        f"--download {rate_text(download)} is too slow for this run: {size_text(load_bytes)} must arrive in each "
        f"round, within {within_s:.0f} s\nAllow at least --download {_flag(load_bytes / LINE_SHARE / within_s)}."
    )


def _too_slow_up(demand: Demand, upload: int, num_owned: int) -> str:
    size = demand.publish_bytes(num_owned)
    within_s = demand.transfer_s + (1 - MIN_STEPS) * demand.round_max_s
    return (
        f"--upload {rate_text(upload)} is too slow for this run: with {_shards(num_owned)} an update of "
        f"{size_text(size)} must leave within {within_s:.0f} s\n"
        f"Allow at least --upload {_flag(size / LINE_SHARE / within_s)}; "
        f"{_flag(size / LINE_SHARE / demand.transfer_s)} would do without fewer steps."
    )


def _shards(count: int) -> str:
    return f"{count} shard{'' if count == 1 else 's'}"


def _flag(bytes_per_s: float) -> str:
    """A rate as it is typed, rounded up: what is written there must do."""
    return f"{math.ceil(max(bytes_per_s, MIN_RATE_BYTES_PER_S) / 1000)}kB/s"
