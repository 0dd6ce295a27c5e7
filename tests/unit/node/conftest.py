from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.storage.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()
