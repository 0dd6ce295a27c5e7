import math

import msgspec
import pytest

from spes_p2p.ids import RoundNumber
from spes_p2p.node.worker_messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Hello,
    LoadStart,
    Progress,
    ReplyEnvelope,
    RequestEnvelope,
    SetShare,
    StopTraining,
    frame_length,
    read_reply,
    read_request,
    to_frame,
)
from spes_p2p.training.start import StartSpec

SPEC = StartSpec(round=RoundNumber(3), global_step=90, parts=(b"a" * 32,), shards=(((b"b" * 32, 5),),))


@pytest.mark.parametrize(
    "request_body",
    [
        Hello(config=b"{}", peer=b"p" * 32, blobs_dir="b", state_dir="s", data=("x",)),
        LoadStart(spec=SPEC, owned=(0,), masters={0: "carry"}, residual="advance", accepted_update=3, kept_parts=(1,)),
        StopTraining(),
        SetShare(share=0.5),
    ],
)
def test_requests_survive_their_frame(request_body):
    frame = to_frame(RequestEnvelope(7, request_body))
    assert frame_length(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert read_request(frame[LENGTH_BYTES:]) == RequestEnvelope(7, request_body)


def test_a_loss_that_is_not_a_number_survives_its_frame():
    progress = Progress(
        local_step=1, num_inner_steps=2, global_step=3, loss=math.nan, tokens=0, tokens_per_s=0.0, num_skipped=1
    )
    body = read_reply(to_frame(ReplyEnvelope(1, progress))[LENGTH_BYTES:]).body
    assert isinstance(body, Progress)
    assert math.isnan(body.loss)


def test_frames_that_are_too_long_are_refused_on_both_sides():
    hello = Hello(config=b"x" * MAX_FRAME_BYTES, peer=b"", blobs_dir="", state_dir="")
    with pytest.raises(ValueError, match="is over"):
        to_frame(RequestEnvelope(1, hello))
    with pytest.raises(ValueError, match="is over"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1, {"type": "exec", "code": "1"}])])
def test_other_bytes_are_refused(payload):
    with pytest.raises(msgspec.MsgspecError):
        read_request(payload)
