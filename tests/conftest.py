"""What every test shares. The tiny models are in `tiny.py`."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors are faster on one thread, and sums do not depend on the machine's cores."""
    torch.set_num_threads(1)
