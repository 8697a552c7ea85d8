"""What every test shares. The tiny models are in `tiny.py`."""

import pytest
import torch

from dflash_hf.decoding import Decoding


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors are faster on one thread, and sums do not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture
def rows(monkeypatch):
    """Which rows the latest draft was for."""
    current = []
    draft = Decoding.draft
    monkeypatch.setattr(Decoding, "draft", lambda self, width: (current.append(self), draft(self, width))[1])
    return lambda: current[-1].state.texts.rows
