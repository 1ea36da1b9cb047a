"""Ranks on a machine with a GPU. Without a GPU these tests fail, and `make test` leaves them out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.distributed import ranks


@pytest.fixture(scope="session")
def rank_server() -> Iterator[None]:
    """Start the server that forks ranks; it has imported torch and never touches CUDA."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("torch sees no GPU here: leave these tests out (-m 'not gpu').", pytrace=False)
    ranks.start_server()
    yield
    ranks.stop_server()
