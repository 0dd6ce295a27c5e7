"""`NodeSnapshot`: everything a user interface may know of a node, frozen, and JSON on the local API.

The node makes one several times a second; the terminal UI, `status` and `--json` are functions of it. Peers appear in
their textual form, digests in hex, times in milliseconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PAUSE = "pause"
"""The reason of `spes-p2p pause` and of the key in the UI; other reasons name themselves, in words for people."""
Phase = Literal["join", "load", "train", "publish", "acknowledge", "aggregate", "vote", "adopt", "finished"]
PHASES: tuple[Phase, ...] = ("train", "publish", "acknowledge", "aggregate", "vote", "adopt")
"""The phases of a round, in order; `join` and `load` come before the first, `finished` after the last."""


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the open round."""

    name: Phase
    progress: float
    """0 to 1."""
    detail: str = ""
    """Such as `12/40 steps` or `3 of 4 receipts`."""


class RoundView(msgspec.Struct, frozen=True, kw_only=True):
    """The round this node is in."""

    number: int
    phase: Phase
    phases: tuple[PhaseView, ...] = ()
    elapsed_ms: int = 0
    time_left_ms: int | None = None
    """Until the open phase's time-out, where it has one."""
    view: int = 0
    leader: str = ""
    votes: int = 0
    """Prevotes or precommits held for the proposal, whichever step is open."""
    votes_needed: int = 0
    waiting_for: str = ""
    """What the node waits for, in words; empty when it does not wait."""
    last_parts: int = 0
    """Parts of psi in the last certificate; 0: not known."""
    last_kept_parts: int = 0
    """How many of them it kept as they were, since too few aggregators agreed on an average."""


class ShardView(msgspec.Struct, frozen=True, kw_only=True):
    """One expert shard of the run."""

    shard: int
    owners: tuple[str, ...]
    """Peer ids; empty: an orphan."""
    mine: bool
    last_accepted_round: int
    """Round of the last accepted update for it; 0: none yet."""


class UpdateView(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one update of this node."""

    round: int
    verdict: str
    """`pending`, `accepted`, `accepted late`, `superseded`, `not included`, or `refused: ` and why."""
    tokens: int


class LearningView(msgspec.Struct, frozen=True, kw_only=True):
    """How training goes."""

    loss_curve: tuple[tuple[int, float], ...] = ()
    """(global step, nats per token) of this peer's training, the latest few hundred points."""
    val_curve: tuple[tuple[int, float], ...] = ()
    """(round, nats per byte) on the held-out set, of the state that the round's certificate made."""
    tokens_per_s: float = 0.0
    tokens_total: int = 0
    """Tokens this node trained and got certified."""
    inner_step: int = 0
    inner_steps: int = 0
    global_step: int = 0
    updates: tuple[UpdateView, ...] = ()
    """This node's latest updates, oldest first."""


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the run as this node sees it."""

    peer: str
    me: bool
    voter: bool
    connected: bool
    shards: tuple[int, ...]
    accepted_updates: int
    last_item_round: int
    latency_ms: float | None = None
    """Until it confirms a small message, its fastest of late; None: not measured."""
    transport: str = ""
    """How it is connected: `tcp`, `quic`, `websocket` (each directly) or `relayed`; empty: not known."""


class NetworkView(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic since the node started, and the members."""

    bytes_sent: int = 0
    bytes_received: int = 0
    sent_per_s: float = 0.0
    received_per_s: float = 0.0
    round_sent: int = 0
    """Bytes since the open round began."""
    round_received: int = 0
    peers: tuple[PeerView, ...] = ()
    listen: tuple[str, ...] = ()


class GpuView(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that trains; None: the driver does not say."""

    number: int
    name: str
    memory_bytes: int | None = None
    """In use, by whomever."""
    memory_total_bytes: int | None = None
    use_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """This machine; None: not measured yet, or not told."""

    device: str
    memory_bytes: int = 0
    """Resident memory of node and trainer."""
    trainer_restarts: int = 0
    num_cores: int = 0
    cores_used: float | None = None
    """By this node's processes."""
    cpu_percent: float | None = None
    """Of all cores, by everybody."""
    ram_bytes: int = 0
    """In use, by everybody."""
    ram_total_bytes: int = 0
    battery_percent: float | None = None
    on_battery: bool | None = None
    """None: no battery."""
    gpus: tuple[GpuView, ...] = ()


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What this node has done since it started."""

    rounds_adopted: int = 0
    parts_aggregated: int = 0
    cuts_made: int = 0
    updates_published: int = 0
    updates_acknowledged: int = 0
    pieces_refused: int = 0
    rechecks: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_refused: int = 0


class RecoveryView(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery by this node would do: a new epoch, unsafe under partition."""

    keeps: tuple[str, ...]
    """Peers that stay members."""
    time_left_ms: int | None = None
    """Until it happens by itself; None: only if the operator says so."""


class PauseView(msgspec.Struct, frozen=True, kw_only=True):
    """Training is held: why, since when, and how long the rules let the node keep its shards."""

    reasons: tuple[str, ...]
    """Why, the oldest reason first; `pause` is the user's own."""
    since_ms: int
    """How long it has been held, ms."""
    lease_ends_round: int | None = None
    """The certificate of this round takes the first shards unless the node trains again before; None: none to lose."""
    rounds_left: int | None = None
    """Rounds until that one ends, the open one included."""
    lease_ends_in_ms: int | None = None
    """About how long until then; None: not known yet, or nothing to lose."""
    shards: tuple[int, ...] = ()
    """The shards that go first."""
    reason: str = ""
    """The same in words for people: what is kept, for how many rounds and about how long."""


class LeaveStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a proper leave that is not done yet."""

    name: Literal["finish", "hand over", "certificate", "successors", "last messages"]
    text: str
    """For people, such as `the new owners fetch what is handed over (1 of 2 have)`."""


class LeaveView(msgspec.Struct, frozen=True, kw_only=True):
    """What remains of a proper leave. Closing before it is safe costs nobody but those who take over."""

    steps: tuple[LeaveStep, ...] = ()
    """What remains, in order; the first is under way."""
    safe_in_ms: int | None = None
    """About how long until it is safe to close; 0: it is; None: not known."""
    safe_to_close: bool = False
    """Nobody needs anything of this node any more."""


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """One limit that this machine's owner set, and what is used of it now."""

    name: str
    """`upload`, `download`, `monthly`, `hours`, `idle_only`, `pause_on_battery`, `gpu_share` or `gpu_power`."""
    limit: str
    """Such as `1 MB/s`."""
    used: str
    """Such as `0.93 MB/s`."""
    share: float | None = None
    """Used of the limit, where that is a number."""
    holds: str = ""
    """What it holds now, and until when; empty: nothing."""


class LimitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that are numbers, for programs; None: no such limit."""

    upload_bytes_per_s: int | None = None
    download_bytes_per_s: int | None = None
    month_bytes: int | None = None
    """Of a calendar month, both directions together."""
    gpu_share: float | None = None
    """Of the trainer's time, 0 to 1."""
    gpu_power_w: int | None = None
    """Of each GPU."""
    month_used_bytes: int = 0
    """Of this month so far; counted without a limit, too."""


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that are set."""

    limits: tuple[LimitView, ...] = ()
    holds: tuple[str, ...] = ()
    """Why limits hold training now, in words; empty: they do not."""
    no_blobs: str = ""
    """Why this node neither serves nor fetches blobs; empty: it does."""
    note: str = ""
    """How the rates and the run go together, such as that fewer shards are offered; empty: nothing to say."""
    figures: LimitFigures = LimitFigures()


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a node."""

    version: str
    run_name: str
    run_id: str
    peer: str
    started_ms_ago: int
    member: bool
    voter: bool
    leaving: bool
    """A proper leave was asked for; `round.waiting_for` says what remains."""
    paused: bool = False
    """Training is held, for whatever reason."""
    pause: PauseView | None = None
    """None: training is not held."""
    leave: LeaveView | None = None
    """None: no leave was asked for."""
    certified_round: int
    """Round of the last certificate this node holds, final or tentative."""
    final_round: int = 0
    """Round of the last final one; the certificates after it are tentative."""
    epoch: int = 0
    """Above 0: so many recoveries have been made."""
    waiting: str = ""
    """Why the run cannot go on, not even tentatively, such as `2 of 4 voters heard, 3 needed`; empty: it can."""
    holds_recovery_key: bool = False
    recovery: RecoveryView | None = None
    """None: this node holds no recovery key, or the run can go on."""
    psi_digest: str
    """Of the last certificate's shared modules, in hex."""
    round: RoundView
    shards: tuple[ShardView, ...]
    learning: LearningView
    network: NetworkView
    machine: MachineView
    counters: Counters
    limits: LimitsView = LimitsView()


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a node's log, for people."""

    number: int
    """Counts up from 1 in this process."""
    at_ms: int
    """Milliseconds since the node started."""
    level: Literal["info", "warning", "error"]
    text: str
