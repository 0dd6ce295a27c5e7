"""What a node tells its volunteer about the text it trains on, and about a pause."""

from __future__ import annotations

import pytest

from spes_p2p.node.holds import PAUSE, Holds
from spes_p2p.node.node import hold_text, text_found
from spes_p2p.node.worker_messages import Ready


@pytest.mark.parametrize(
    ("num_held_out", "bounded", "more"),
    [
        (0, False, ""),
        (0, True, ", a sample of what there is"),
        (2, False, "; 2 left out because they are in the run's held-out set"),
        (2, True, ", a sample of what there is; 2 left out because they are in the run's held-out set"),
    ],
)
def test_the_volunteer_hears_of_a_sample_and_of_documents_that_are_left_out(
    num_held_out: int, bounded: bool, more: str
) -> None:
    ready = Ready(
        num_documents=6,
        num_bytes=12_345,
        num_held_out=num_held_out,
        capacity=1,
        memory="",
        bounded=bounded,
        resumed_round=None,
    )
    assert text_found(ready) == f"6 documents, 12,345 bytes of text to train on{more}"


def test_the_volunteer_hears_what_holds_training_and_what_still_does() -> None:
    holds = Holds()
    holds.set(PAUSE, True)
    assert hold_text(holds, PAUSE, True, None) == "training is held: pause"
    holds.set("on battery", True)
    holds.set(PAUSE, False)
    assert hold_text(holds, PAUSE, False, None) == "no longer held: pause; it is still held: on battery"
    holds.set("on battery", False)
    assert hold_text(holds, "on battery", False, None) == "no longer held: on battery; training goes on"
