"""Errors of torch 2.13 that mean the loss of another rank, and similar errors that don't."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurmddp.errors import CheckpointError, RankFailure
from slurmddp.training.process_group.lost_rank import is_lost_rank

pytestmark = pytest.mark.distributed
GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"


@pytest.mark.parametrize(
    "text",
    [
        f"[{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:53439. This is typically caused by a "
        "remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️",
        f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        f"[{GLOO}/pair.cc:525] Read error [127.0.0.1]:4711: Connection reset by peer",
        "Application timeout caused pair closure",
    ],
)  # fmt: skip
def test_gloos_messages_about_a_lost_rank_are_recognised(text: str) -> None:
    assert is_lost_rank(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Could not restore the optimizer"),
        RuntimeError("The feature store has no such table; nothing was stored."),
        RuntimeError("No peer review of sample 17; the database connection of the store is lost."),
        RuntimeError("See [docs/gloo/pair.cc:1] Connection closed by peer in the manual"),
        RuntimeError(f"[enforce fail at {GLOO}/pair.cc:446] op.preamble.length <= op.nbytes. 400 vs 16"),
        RuntimeError("wait timeout after 300000ms, keys: /restored"),
        ConnectionResetError(104, "Connection reset by peer"),
        OSError(107, "Transport endpoint is not connected: /mnt/store"),
        CheckpointError("The checkpoint could not be restored from the store."),
        NotImplementedError("nccl"),
        None,
    ],
)
def test_similar_errors_are_not_a_lost_rank(error: Exception | None) -> None:
    assert not is_lost_rank(error)


def test_the_store_of_a_dead_rank_is_a_lost_rank(store_host) -> None:
    host, store = store_host
    with pytest.raises(RuntimeError) as late:
        store.wait(["key"], timedelta(seconds=0.1))
    host.kill()
    host.join()
    with pytest.raises(RuntimeError) as gone:
        store.get("key")
    assert is_lost_rank(late.value)
    assert is_lost_rank(gone.value)


def test_an_error_caused_by_a_lost_rank_is_recognised() -> None:
    behind = ValueError("a program's own")
    behind.__cause__ = RankFailure("Rank 0 went away.")
    assert is_lost_rank(behind)
