"""A process that only lost another rank differs from similar errors. The logs are of torch 2.13."""

from __future__ import annotations

import pytest

from slurmddp.runs.failures.capture import here, tail_of
from slurmddp.runs.failures.causes import find_cause, reads_like_a_lost_peer

GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
OURS = [
    f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.1]:21644. This is typically caused by a remote "
    "worker crashing. Check the logs of the remote worker before reporting an error. GLHF!",
    f"{GLOO}pair.cc:537] Read error [10.0.0.1]:1942: Connection reset by peer. This is typically caused by a "
    "remote worker hanging or bugs in the application.",
    f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:149] no error",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms\n Original exception: \n"
    "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:24464.",
    "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
    "send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \nnone",
    "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /0//cpu//0/1",
    "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to "
    "connect to (n1, 37923).",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the "
    "remote server shutdown or crash?",
    "torch.distributed.DistNetworkError: Broken pipe",
    "[rank3]: torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.cpp:94, remote process exited "
    "or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote process exiting prematurely.\nLast error:\nsocketProgressOpt: recv failed",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
]  # fmt: skip
NOT_OURS = [
    "RuntimeError: store was closed: cannot read train.lmdb",
    "RuntimeError: Connection reset by peer",
    "RuntimeError: curlCode: 56, Recv failure: Connection reset by peer",
    "RuntimeError: s3://data/shard-1: connection closed by server",
    "redis.exceptions.ConnectionClosed: connection closed",
    "KeyError: 'peer closed'",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "urllib3.exceptions.ProtocolError: ('Connection broken', ConnectionResetError('Connection reset'))",
    "botocore.exceptions.ConnectionClosedError: Connection was closed before a valid response",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
    "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:453] op.preamble.length <= op.nbytes. 8 vs 4",
]  # fmt: skip


def traceback(message: str, code: str = "step(batch)") -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    {code}\n{message}\n'


@pytest.mark.parametrize("message", OURS)
def test_torchs_errors_of_a_lost_rank_are_known(message: str) -> None:
    assert find_cause(1, None, tail_of(traceback(message))).kind == "lost_peer"


@pytest.mark.parametrize("message", NOT_OURS)
def test_an_error_that_only_sounds_alike_is_the_ranks_own(message: str) -> None:
    failure = here(1, node_rank=0, rank=0, lines=tail_of(traceback(message)))
    assert message[:40] in failure.reason
    assert not reads_like_a_lost_peer(failure.last_lines)


@pytest.mark.parametrize(
    "code",
    [
        "trainer.restore(path, reset_optimizer=True)",
        'raise Lost("gloo: connection closed by peer [1]")',
    ],
)
def test_a_line_of_code_in_a_traceback_says_nothing_of_a_lost_rank(code: str) -> None:
    assert (
        find_cause(1, None, tail_of(traceback("KeyError: 'lr'", code))).reason
        == "KeyError: 'lr' (train.py:7 in main)"
    )


@pytest.mark.parametrize(
    "noise",
    [
        "[rank1]:[W1110 TCPStore.cpp:125] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
        "n1:123:456 [0] NCCL INFO comm 0x55d rank 0 nranks 2 cudaDev 0 busId 1b000 - Abort COMPLETE",
    ],
)
def test_what_threads_of_torch_print_beside_an_exception_does_not_hide_it(noise: str) -> None:
    text = f"{traceback('KeyError: 7')}{noise}\n"
    assert find_cause(1, None, tail_of(text)).reason == "KeyError: 7 (train.py:7 in main)"


def test_a_lost_rank_is_recognized_without_a_traceback() -> None:
    message = OURS[0].partition(": ")[2]
    assert find_cause(1, None, ["step 7", f"training failed: {message}"]).kind == "lost_peer"
    assert find_cause(1, None, ["step 7", "n1:1:2 [0] NCCL INFO comm 0x5 - Abort COMPLETE"]).reason == ""
    socket = "[c10d] sendBytes failed on SocketImpl(fd=3, addr=[n1]:1, remote=[n2]:2): Broken pipe"
    assert find_cause(None, "SIGABRT", [socket]).kind == "lost_peer"


HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def test_an_error_of_its_own_after_which_a_rank_waited_for_the_others_is_the_reason() -> None:
    own_traceback = traceback("KeyError: 'lr'")
    text = f"{own_traceback}{HANDLING}{traceback(OURS[2], 'dist.barrier()')}"
    failure = here(1, node_rank=0, rank=1, lines=tail_of(text))
    assert failure.reason == "KeyError: 'lr' (train.py:7 in main)"
    assert not reads_like_a_lost_peer(failure.last_lines)


@pytest.mark.parametrize(
    "first",
    [
        traceback(OURS[0]),
        traceback("KeyError: 'x'").replace("train.py", "/venv/lib/python3.11/site-packages/torch/a.py"),
    ],
)
def test_a_loss_that_a_library_ran_into_on_its_second_try_is_one(first: str) -> None:
    text = f"{first}{HANDLING}{traceback(OURS[2], 'dist.barrier()')}"
    assert find_cause(1, None, tail_of(text)).kind == "lost_peer"
