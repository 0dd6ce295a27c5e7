"""Runs the demo from beginning to end, with plain lines or with the terminal UI in front."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from spes_p2p.client.demo.figures import swarm_figures
from spes_p2p.client.demo.newcomer import newcomers_loss
from spes_p2p.client.demo.swarm import Plan, Say, running_swarm
from spes_p2p.errors import SpesError
from spes_p2p.node.history import read_history

SAME_START = 0.02
"""Largest difference in nats per byte between the swarm's and the baseline's first loss: rounding of experts."""


def conduct(plan: Plan, say: Say, stopping: threading.Event, *, baseline: bool) -> dict[str, Any]:
    """Run the swarm, collect its figures, end it, then the baseline. Raises SpesError and KeyboardInterrupt."""
    with running_swarm(plan, say, stopping) as swarm:
        swarm.follow()
        snapshots = dict(swarm.snapshots)
    # the peers have ended: their ledgers are read from disk, as `spes-p2p ledger show` would
    ledgers = {peer: read_history(plan.peer_folder(peer)) for peer in plan.peers}
    figures = swarm_figures(plan.num_rounds, ledgers, snapshots)
    figures["val_loss_last"] = newcomers_loss(plan.peer_folder(plan.num_peers))
    if baseline:
        say("training one peer alone, for comparison")
        figures |= _baseline_figures(plan, figures)
    figures["seconds_to_first_certificate"] = round(swarm.first_certificate_s or 0.0, 1)
    figures["seconds_total"] = round(swarm.elapsed_s(), 1)
    return figures


def _baseline_figures(plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    from spes_p2p.client.demo.baseline import run_baseline
    from spes_p2p.config import RunConfig

    config_file = plan.folder / "run.toml"
    batch_tokens = RunConfig.from_toml(config_file).training.batch_tokens
    num_steps = round(figures["tokens_trained"] / batch_tokens / plan.num_peers)
    result = run_baseline(config_file, plan.peer_folder(1), num_steps, [plan.text_folder(peer) for peer in plan.peers])
    if abs(result["first"] - figures["val_loss_first"]) > SAME_START:
        raise SpesError(
            f"the baseline began at {result['first']:.3f} nats per byte, the swarm at {figures['val_loss_first']:.3f}: "
            "they cannot be compared"
        )
    return {"baseline_loss": result["last"], "baseline_steps": num_steps}


def conduct_with_ui(plan: Plan, stopping: threading.Event, *, baseline: bool) -> dict[str, Any]:
    """The same with the terminal UI: the swarm is conducted in a thread, and quitting the UI ends it."""
    from spes_p2p.client.ui.app import SwarmApp
    from spes_p2p.client.ui.feed import ControlFeed

    app = SwarmApp([ControlFeed(plan.peer_folder(peer), name=f"peer {peer}") for peer in plan.peers], role="demo")
    outcome: list[dict[str, Any] | BaseException] = []

    def work() -> None:
        try:
            outcome.append(conduct(plan, app.tell, stopping, baseline=baseline))
        except (SpesError, OSError, KeyboardInterrupt) as error:
            outcome.append(error)
        finally:
            app.end_from_thread()

    thread = threading.Thread(target=work, name="conductor")
    _run_then_join(app.run, thread, stopping)
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def _run_then_join(run: Callable[[], object], thread: threading.Thread, stopping: threading.Event) -> None:
    thread.start()
    try:
        run()
    finally:
        stopping.set()
        thread.join()
