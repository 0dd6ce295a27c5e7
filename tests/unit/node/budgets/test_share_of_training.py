"""The share of the time, told to a trainer before and while it trains."""

from __future__ import annotations

import queue
from typing import Any

from spes_p2p.node.trainer_main import Pipes
from spes_p2p.node.worker_messages import Hello, RequestEnvelope, SetShare, Train, to_frame


def test_a_share_reaches_a_training_that_is_under_way(monkeypatch: Any) -> None:
    """Hello and SetShare are read by the thread that reads, not in the order of requests."""
    pipes = Pipes.__new__(Pipes)
    pipes.share, pipes._stopped_through, pipes._in_fd = 1.0, -1, 0
    pipes._requests = queue.SimpleQueue()
    hello = Hello(config=b"", peer=b"", blobs_dir="", state_dir="", share=0.5)
    requests = [RequestEnvelope(1, hello), RequestEnvelope(2, Train(num_inner_steps=3))]
    shares = []

    def frames(_: int) -> Any:
        for request in (*requests, RequestEnvelope(3, SetShare(share=0.2))):
            yield to_frame(request)[4:]
            shares.append(pipes.share)

    monkeypatch.setattr("spes_p2p.node.trainer_main.read_frames", frames)
    pipes._read_all()
    assert shares == [0.5, 0.5, 0.2]
    assert [pipes.next(), pipes.next()] == requests
    assert pipes._requests.empty()
