"""The wish to leave outlives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import MachineError
from spes_p2p.node import leaving
from spes_p2p.node.leaving import LeaveWish


async def test_wish_is_there_for_the_next_start_until_it_is_done(tmp_path: Path) -> None:
    wish = LeaveWish(tmp_path)
    assert not wish.is_stored
    wish.want()
    assert wish.wanted.is_set()
    again = LeaveWish(tmp_path)
    assert again.is_stored
    assert not again.wanted.is_set()
    again.forget()
    again.forget()
    assert not LeaveWish(tmp_path).is_stored


async def test_wish_that_cannot_be_stored_holds_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MachineError("disk full")

    monkeypatch.setattr(leaving, "write_file", full)
    wish = LeaveWish(tmp_path)
    with pytest.raises(MachineError):
        wish.want()
    assert wish.wanted.is_set()
