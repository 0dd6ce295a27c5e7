"""Claim: the control traffic of a round stays small as a run grows: at 64 members 1 MiB per peer, 4 MiB for a leader.

Ours: the round machines in the simulated swarm, without faults, with stand-ins for signatures of the same size. Bytes
of messages sent, without blobs. Peer: what the first model of this protocol sent (docs/protocol.md, section 10).

    python benchmarks/traffic.py [--peers 4,7,16,64] [--parts 64] [--slow] [--kinds] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.config import ModelConfig, RunConfig
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import decode
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Signed
from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

FIRST_MODEL_KIB = {4: (26, 32), 7: (67, 102), 16: (471, 861), 64: (3_900, 34_000)}
MEAN_TARGET_KIB, LEADER_TARGET_KIB = 1_024, 4_096
MAX_FOUNDERS = 128
MAX_SHARDS = 64
TRAIN_MS = 8_000
LOOK_MS = 20
"""How often it is looked whether all have adopted: a look costs as much as a message."""


@dataclass(slots=True)
class Traffic:
    """What was sent, by the sender's open round."""

    messages: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(round, kind) -> messages."""
    size_bytes: Counter[tuple[int, str]] = field(default_factory=Counter)
    sent: Counter[tuple[int, PeerId]] = field(default_factory=Counter)
    """(round, sender) -> bytes."""
    received: Counter[tuple[int, PeerId]] = field(default_factory=Counter)


class MeteredSwarm(Swarm):
    """Counts what is sent. Beyond 128 founders, members are in the roster from the beginning."""

    def __init__(self, num_members: int, parts: int, line: Line) -> None:
        self.traffic = Traffic()
        self._newest: tuple[bytes, str] = (b"", "")
        names = [f"p{number}" for number in range(num_members)]
        others = tuple(names[MAX_FOUNDERS:])
        super().__init__(_config(num_members, parts), names[:MAX_FOUNDERS], seed=1, num_parts=parts, members=others)
        for peer in self.peers.values():
            peer.line = line

    def run_to_round(self, number: int, limit_ms: int, peers: list[SimPeer] | None = None) -> bool:
        """Like `Swarm.run_to_round`, looked at every now and then."""
        ends_at_ms = self.now_ms + limit_ms
        while self.now_ms < ends_at_ms and self._heap:
            self.run(lambda: False, max(LOOK_MS, self._heap[0][0] - self.now_ms))
            if all(peer.machine.head.round >= number for peer in self.peers.values()):
                return True
        return False

    def _send(self, peer: SimPeer, send: fx.Send) -> None:
        number, size_bytes, kind = peer.machine.head.round + 1, len(send.data), self._kind(send.data)
        self.traffic.messages[number, kind] += 1
        self.traffic.size_bytes[number, kind] += size_bytes
        self.traffic.sent[number, peer.peer_id] += size_bytes
        self.traffic.received[number, send.to] += size_bytes
        super()._send(peer, send)

    def _kind(self, data: bytes) -> str:
        if data is not self._newest[0]:  # one message to many peers is one object
            message = decode(data)
            self._newest = data, message.body.tag if isinstance(message, Signed) else type(message).__name__
        return self._newest[1]


def _config(num_members: int, parts: int) -> RunConfig:
    """The demo's times, with a shard per member up to 64."""
    model = ModelConfig(num_experts=max(8, min(num_members, MAX_SHARDS)))
    return quick_config(parts=parts).model_copy(update={"model": model})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: per peer and round, of rounds without faults."""

    peers: int
    parts: int
    messages: float
    mean_kib: float
    leader_kib: float
    """The first leader of a round, the worst of the rounds."""
    leader_received_kib: float
    round_s: float
    after_training_s: float
    cpu_s_per_round: float
    views: list[int]
    kinds: dict[str, tuple[float, float]]
    """Kind -> messages, KiB."""


def measure(num_members: int, parts: int, first: int, rounds: int, line: Line) -> Row:
    """Run to the last round and count those from `first` on: 1 is for claims, 2 for the first updates."""
    swarm = MeteredSwarm(num_members, parts, line)
    if first > 1 and not swarm.run_to_round(first - 1, 3_600_000):
        raise SystemExit(f"{num_members} peers: stuck before round {first}")
    began_s, began_at_ms = time.process_time(), swarm.now_ms
    last = first + rounds - 1
    if not swarm.run_to_round(last, 3_600_000):
        raise SystemExit(f"{num_members} peers: stuck before round {last + 1}")
    cpu_s = time.process_time() - began_s
    peer, traffic, share = next(iter(swarm.peers.values())), swarm.traffic, rounds * num_members * 1024
    numbers = range(first, last + 1)
    leaders = [(head.round + 1, Terms(head).leader(0)) for head in peer.heads if head.round + 1 in numbers]
    kinds = {kind for number, kind in traffic.messages if number in numbers}
    total = {kind: sum(traffic.size_bytes[number, kind] for number in numbers) for kind in kinds}
    count = {kind: sum(traffic.messages[number, kind] for number in numbers) for kind in kinds}
    round_s = (swarm.now_ms - began_at_ms) / rounds / 1000
    return Row(
        peers=num_members,
        parts=parts,
        messages=round(sum(count.values()) / rounds / num_members, 1),
        mean_kib=round(sum(total.values()) / share, 1),
        leader_kib=round(max(traffic.sent[leader] for leader in leaders) / 1024, 1),
        leader_received_kib=round(max(traffic.received[leader] for leader in leaders) / 1024, 1),
        round_s=round(round_s, 2),
        after_training_s=round(round_s - line.train_ms / 1000, 2),
        cpu_s_per_round=round(cpu_s / rounds, 1),
        views=[certificate.view for certificate in peer.certificates[first - 1 : last]],
        kinds={
            kind: (round(count[kind] / rounds / num_members, 1), round(total[kind] / share, 1))
            for kind in sorted(kinds, key=lambda kind: -total[kind])
        },
    )


def _claims(row: Row) -> list[dict[str, object]]:
    """What the benchmark's file says about a row: mean and leader against the first model, less is better."""
    if row.peers not in FIRST_MODEL_KIB:
        return []
    mean, leader = FIRST_MODEL_KIB[row.peers]
    claims = [("mean", row.mean_kib, mean, MEAN_TARGET_KIB), ("leader", row.leader_kib, leader, LEADER_TARGET_KIB)]
    return [
        {
            "name": f"control traffic of {row.peers} peers, {row.parts} parts, {who}, KiB per round",
            "ours": ours,
            "peer": theirs,
            "ratio": round(ours / theirs, 3),
            "better": "lower",
            "target": round(target / theirs, 3),
        }
        for who, ours, theirs, target in claims
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="4,7,16,64", help="numbers of members")
    parser.add_argument("--parts", type=int, default=64, help="parts of the shared modules")
    parser.add_argument("--first", type=int, default=3, help="first round that counts")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count")
    parser.add_argument("--slow", action="store_true", help="latencies of 10 to 400 ms, blobs in 2 s, 2 %% of loss")
    parser.add_argument("--kinds", action="store_true", help="also by kind of message")
    parser.add_argument("--json", type=Path, help="write the comparison with the first model here")
    options = parser.parse_args()
    line = Line(train_ms=TRAIN_MS)
    if options.slow:
        line = Line(train_ms=TRAIN_MS, latency_ms=(10, 400), transfer_ms=2_000, loss=0.02)
    claims = []
    print("peers parts  messages  mean KiB  leader KiB  leader got KiB  round s  after training s  CPU s/round  views")
    for peers in options.peers.split(","):
        row = measure(int(peers), options.parts, options.first, options.rounds, line)
        print(
            f"{row.peers:5} {row.parts:5} {row.messages:9} {row.mean_kib:9} {row.leader_kib:11}"
            f" {row.leader_received_kib:15} {row.round_s:8} {row.after_training_s:17} {row.cpu_s_per_round:12}"
            f"  {row.views}",
            flush=True,
        )
        if options.kinds:
            for kind, (messages, kib) in row.kinds.items():
                print(f"    {kind:18} {messages:8} messages  {kib:8} KiB")
        claims += _claims(row)
    if options.json is not None:
        options.json.write_text(json.dumps(claims, indent=2) + "\n")


if __name__ == "__main__":
    main()
