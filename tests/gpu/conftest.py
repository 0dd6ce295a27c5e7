from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _only_with_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
