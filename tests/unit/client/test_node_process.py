"""What a node in a process of its own leaves behind for the person who started it."""

from __future__ import annotations

import pytest

from spes_p2p.client.node_process import end_of_log

LOG = "15:37:33 [info     ] found 2 peers of the run\n15:37:34 [info     ] round 1 certified certified=1\n"
UNREACHABLE = "none of the bootstrap addresses answered within 60 s:\n  /a: refused\n  /b: refused\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "words"),
    [
        (LOG + UNREACHABLE, 3, UNREACHABLE.strip()),
        (UNREACHABLE, 3, UNREACHABLE.strip()),
        (LOG, 1, LOG.strip()),
        (LOG, -9, "the node was killed (SIGKILL); join again and it goes on where it was"),
        ("", -15, "the node was killed (SIGTERM); join again and it goes on where it was"),
        (LOG + "Fatal Python error\n", -6, "Fatal Python error"),
    ],
)
def test_whole_complaint_is_told_without_the_log(text: str, exit_code: int, words: str) -> None:
    assert end_of_log(text, exit_code) == words
