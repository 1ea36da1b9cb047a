"""The recording of a rank's last collectives on request, and the GPU of NCCL's communicators."""

from __future__ import annotations

import contextlib
import pickle
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from slurmddp.environments.rank_info import RankInfo
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.training.process_group import flight_recording, setup
from slurmddp.training.process_group.setup import RankContext
from support.runs.agent_runs import wait_until

GPU = torch.device("cuda:1")


def test_the_rank_writes_its_recording_whenever_the_agent_asks(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    prefix = recorder.environment({})[flight_recording.PIPE_VARIABLE]
    Path(f"{prefix}3.pipe").touch()  # of an earlier rank
    written: list[str] = []
    with contextlib.ExitStack() as undo:
        flight_recording.answer_requests(Path(f"{prefix}3.pipe"), lambda: written.append("recording"), undo)
        for number in (1, 2):
            recorder.request([2, 3])
            wait_until(lambda number=number: len(written) == number, f"recording {number}")

    recorder.request([3])
    assert "slurmddp-flight-recording" not in [thread.name for thread in threading.enumerate()]
    assert written == ["recording"] * 2 and not [*Path(prefix).iterdir()]
    recorder.close()


def test_torch_writes_the_recording_of_a_backend_to_the_file_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_file", None)
    assert (dump is not None) == hasattr(distributed, "ProcessGroupNCCL2")
    if dump is None:
        return  # Until torch 2.14 NCCL's process group reads the pipe.

    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "nccl-trace-rank-"))
    distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1).allreduce([torch.ones(1)]).wait()
    with contextlib.ExitStack() as undo:
        request = partial(dump, 7, True, True, False, "gloo")
        flight_recording.answer_requests(tmp_path / "7.pipe", request, undo)
        (tmp_path / "7.pipe").write_bytes(b"1\n")
        file = tmp_path / "nccl-trace-rank-7"
        wait_until(lambda: file.exists() and file.stat().st_size > 0, "the file")
    assert pickle.loads(file.read_bytes())["entries"]


def test_no_pipe_is_made_without_the_class_of_torch_2_15(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight_recording.PIPE_VARIABLE, f"{tmp_path}/")
    monkeypatch.delattr(distributed, "ProcessGroupNCCL2", raising=False)
    with contextlib.ExitStack() as undo:
        flight_recording.start(0, GPU, undo)
        flight_recording.start(0, torch.device("cpu"), undo)
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("backend", "device", "bound_before", "bound"),
    [
        ("nccl", GPU, GPU, GPU),
        ("cpu:gloo,cuda:nccl", GPU, None, GPU),
        ("gloo", GPU, None, None),
        ("cpu:shm,cuda:nccl", GPU, None, None),
        ("cpu:gloo,cuda:nccl", torch.device("cpu"), None, None),
    ],
)
def test_torch_2_15_gets_the_gpu_of_the_rank_for_each_nccl(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    device: torch.device,
    bound_before: torch.device | None,
    bound: torch.device | None,
) -> None:
    registered = [*distributed.Backend.backend_list, "cpu:shm,cuda:nccl"]
    monkeypatch.setattr(distributed.Backend, "backend_list", registered)
    context = RankContext(RankInfo(environment="single"), device, backend, None, contextlib.ExitStack())
    monkeypatch.delattr(distributed, "ProcessGroupNCCL2", raising=False)
    assert setup._bound_device(context) == bound_before
    monkeypatch.setattr(distributed, "ProcessGroupNCCL2", object, raising=False)
    assert setup._bound_device(context) == bound
