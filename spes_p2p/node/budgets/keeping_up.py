"""Whether a capped line keeps up with a run, and with how many shards and inner steps. Pure arithmetic.

What a peer of n members moves in a round, with k of S shards (docs/protocol.md, section 3; e: bytes of one shard's
blob, p: of psi's pieces, r: of psi's results, a: acks of an expert blob, q: replicas of a part):

    publish(k) = k e min(n - 1, a + 1) + p q        what only this peer can give, until its receipt
    load(k)    = (S - k) e + p q (n - 1) / n + r    what it needs to go on: the others' experts, and psi

`a + 1`: as many copies as the receipt needs and one more, since not everybody waits until others have it too. A line
may use LINE_SHARE of its cap for that; the rest is for messages. It has to publish within T after the others have
trained, and to load within a round. Where the update takes longer than T, the peer ends its training earlier, by just
that, as long as MIN_STEPS of H remain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_p2p.config import Limits
from spes_p2p.errors import MachineError
from spes_p2p.node.budgets.limits import MIN_RATE_BYTES_PER_S, rate_text, size_text
from spes_p2p.protocol.head import Terms

LINE_SHARE = 0.9
MIN_STEPS = 0.25
"""Of H: with less, a peer gives the others more to wait for than to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of a line, in bytes and seconds."""

    num_shards: int
    shard_bytes: int
    psi_bytes: int
    """All pieces of one update."""
    result_bytes: int
    """All part results."""
    num_others: int
    """Members besides this peer."""
    expert_acks: int
    replicas: int
    transfer_s: float
    """T."""
    round_max_s: float

    def publish_bytes(self, num_owned: int) -> int:
        """publish(k)."""
        copies = min(self.num_others, self.expert_acks + 1)
        return num_owned * self.shard_bytes * copies + self.psi_bytes * min(self.num_others, self.replicas)

    def load_bytes(self, num_owned: int) -> int:
        """load(k)."""
        pieces = self.psi_bytes * self.replicas * self.num_others // (self.num_others + 1)
        return (self.num_shards - num_owned) * self.shard_bytes + pieces + self.result_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a capped peer takes on."""

    capacity: int
    """Shards to offer."""
    shortened_s: float
    """Ends its training so much earlier than the others."""
    round_max_s: float
    note: str
    """For people; empty: the line does not matter."""

    def steps(self, num_inner_steps: int, step_s: float | None) -> int:
        """Inner steps to make of H. `step_s`: how long one takes here; None: not known, then H fills a round."""
        if not self.shortened_s:
            return num_inner_steps
        each_s = step_s if step_s else self.round_max_s / num_inner_steps
        fewer = math.ceil(self.shortened_s / each_s)
        return max(1, math.floor(MIN_STEPS * num_inner_steps), num_inner_steps - fewer)


def demand_of(terms: Terms, *, is_member: bool) -> Demand:
    """What the round asks. A peer that is no member yet reckons with itself."""
    sizes, protocol = terms.head.run.sizes, terms.config.protocol
    others = len(terms.members) - 1 if is_member else len(terms.members)
    return Demand(
        num_shards=sizes.num_shards,
        shard_bytes=sizes.expert_blob_bytes,
        psi_bytes=sizes.num_parts * sizes.psi_piece_bytes,
        result_bytes=sizes.num_parts * sizes.part_result_bytes,
        num_others=max(0, others),
        expert_acks=terms.expert_acks,
        replicas=terms.replicas,
        transfer_s=terms.transfer_budget_ms / 1000,
        round_max_s=protocol.round_max_ms / 1000,
    )


def keep_up(demand: Demand, limits: Limits, offered: int, *, stated: bool) -> Pace:
    """The most shards, at most `offered`, with which the line keeps up; fewer steps only where one shard is too many.

    `stated`: the owner asked for just that many (`--capacity`), which is kept or refused. Raises MachineError with the
    numbers, and what would do.
    """
    least = offered if stated else 1
    _check_download(demand, limits, least)
    if limits.upload is None:
        return Pace(capacity=offered, shortened_s=0.0, round_max_s=demand.round_max_s, note="")
    line = limits.upload * LINE_SHARE
    for num_owned in range(offered, least - 1, -1):
        if demand.publish_bytes(num_owned) / line <= demand.transfer_s:
            note = "" if num_owned == offered else _fewer_shards(demand, limits.upload, num_owned, offered)
            return Pace(capacity=num_owned, shortened_s=0.0, round_max_s=demand.round_max_s, note=note)
    publish_s = demand.publish_bytes(least) / line
    shortened_s = publish_s - demand.transfer_s
    if shortened_s > (1 - MIN_STEPS) * demand.round_max_s:
        raise MachineError(_too_slow_up(demand, limits.upload, least))
    note = (
        f"--upload {rate_text(limits.upload)}: an update of {size_text(demand.publish_bytes(least))} takes "
        f"{publish_s:.0f} s, more than the {demand.transfer_s:.0f} s after training; with {_shards(least)} training "
        f"ends {shortened_s:.0f} s earlier than the others', with fewer steps"
    )
    return Pace(capacity=least, shortened_s=shortened_s, round_max_s=demand.round_max_s, note=note)


def _check_download(demand: Demand, limits: Limits, num_owned: int) -> None:
    if limits.download is None:
        return
    size, within_s = demand.load_bytes(num_owned), demand.round_max_s + demand.transfer_s
    if size > limits.download * LINE_SHARE * within_s:
        would_do = size / LINE_SHARE / within_s
        raise MachineError(
            f"--download {rate_text(limits.download)} is too slow for this run: {size_text(size)} must arrive in each "
            f"round, within {within_s:.0f} s\nAllow at least --download {_flag(would_do)}."
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


def _fewer_shards(demand: Demand, upload: int, num_owned: int, offered: int) -> str:
    return (
        f"--upload {rate_text(upload)}: {num_owned} of {_shards(offered)} are offered; an update with them, "
        f"{size_text(demand.publish_bytes(num_owned))}, leaves within {demand.transfer_s:.0f} s"
    )


def _shards(count: int) -> str:
    return f"{count} shard{'' if count == 1 else 's'}"


def _flag(bytes_per_s: float) -> str:
    """A rate as it is typed, rounded up: what is written there must do."""
    return f"{math.ceil(max(bytes_per_s, MIN_RATE_BYTES_PER_S) / 1000)}kB/s"
