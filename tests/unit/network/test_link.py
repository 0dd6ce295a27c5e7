from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import LinkError
from spes_p2p.ids import RunId
from spes_p2p.network.addresses import EXAMPLE, EXAMPLE_PEER
from spes_p2p.network.link import LINK_EXAMPLE, InviteLink, format_link, parse_link

ADDRESSES = (
    EXAMPLE,
    f"/dns4/node.example.org/udp/4001/quic-v1/p2p/{EXAMPLE_PEER}",
    f"/ip6/::1/tcp/1/p2p/{EXAMPLE_PEER}",
)
RUN = "1f" * 32


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.sampled_from(ADDRESSES), max_size=4),
    st.none() | st.binary(min_size=32, max_size=32),
    st.none() | st.binary(min_size=96, max_size=96),
)
def test_a_printed_link_reads_back_as_it_was(
    run: bytes, bootstrap: list[str], seed: bytes | None, permit: bytes | None
) -> None:
    link = InviteLink(run=RunId(run), bootstrap=tuple(bootstrap), invite_seed=seed, permit=permit)
    assert parse_link(format_link(link)) == link


def test_a_link_is_one_word_for_a_shell() -> None:
    text = format_link(InviteLink(run=RunId(bytes(32)), bootstrap=ADDRESSES, invite_seed=bytes(range(200, 232))))
    assert shlex.split(text) == [text]
    assert not set(text) & set("?&*[]{}$!<>|;~'\"\\ ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must begin"),
        ("http://example.org", "'http://ex'"),
        ("spes-p2p:", "64"),
        (f"spes-p2p:{RUN[2:]}", "64"),
        (f"spes-p2p:{RUN.upper()}", "lower-case"),
        (f"spes-p2p:{RUN[:-1]}g", "hexadecimal"),
        (f"spes-p2p:{RUN},bootstrap", "'='"),
        (f"spes-p2p:{RUN},peer=x", "'peer'"),
        (f"spes-p2p:{RUN},bootstrap=/ip/1.2.3.4/tcp/1", "'ip'"),
        (f"spes-p2p:{RUN},bootstrap=/ip4/1.2.3.4/tcp/1", "/p2p/"),
        (f"spes-p2p:{RUN},invite=AAAA", "3 bytes"),
        (f"spes-p2p:{RUN},invite=*", "base64url"),
        (f"spes-p2p:{RUN},allow={'A' * 43}", "the permit has 32 bytes, not 96"),
        (f"spes-p2p:{RUN},invite={'A' * 43},invite={'A' * 43}", "twice"),
        (f"spes-p2p:{RUN}" + ",bootstrap=" * 2000, "longer"),
    ],
)
def test_a_bad_link_is_refused_by_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(LinkError) as caught:
        parse_link(text)
    assert problem in str(caught.value)
    assert "good: " in str(caught.value)


def test_the_example_is_good() -> None:
    assert parse_link(LINK_EXAMPLE).bootstrap == (EXAMPLE,)
