"""Ranks that pretend to have GPUs: one rank has no device, or another kind of device than the others."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from slurmddp.environments.detect import detect
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training import rank_main
from slurmddp.training.device import cuda
from slurmddp.training.preflight import preflight
from slurmddp.training.process_group import setup
from slurmddp.training.process_group.device_agreement import DeviceReport, DevicesError

Told = tuple[str, int, str]


def start() -> Told:
    """Start the process group with the other ranks; return the class, exit code and text of the error."""
    try:
        setup.finish(setup.start(detect(os.environ), collective_timeout_s=30.0))
    except SlurmddpError as error:
        return type(error).__name__, error.exit_code, str(error)

    return "", 0, ""


def _start_without_a_gpu(rank: int, error: Exception) -> Told:
    """Let the choice of a GPU raise `error` on one rank."""

    def choose(info: RankInfo) -> int | None:
        if info.rank == rank:
            raise error
        return None

    cuda._choose_index = choose
    return start()


def with_too_few_gpus(rank: int) -> Told:
    return _start_without_a_gpu(
        rank, MismatchError("2 ranks on this node see 1 GPU(s).", hint="Ask for more.")
    )


def with_a_gpu_that_raises(rank: int) -> Told:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with DSA")
    return _start_without_a_gpu(rank, error)


def with_a_gpu_for_one(rank: int) -> Told:
    """Let only one rank find a GPU.

    It would wait for the others under NCCL, and the others for it under gloo.
    """

    def report(info: RankInfo, backend: str) -> tuple[torch.device, str, DeviceReport]:
        if info.rank == rank:
            return torch.device("cpu"), "nccl", DeviceReport(node=info.node_rank, kind="cuda", backend="nccl")
        return torch.device("cpu"), "gloo", DeviceReport(node=info.node_rank, backend="gloo")

    setup.report_device = report
    return start()


def leave_one_after_the_other() -> float:
    """Leave the process group, rank 1 a second after rank 0.

    Return the time at which rank 0 has left it and rank 1 leaves it.
    """
    context = setup.start(detect(os.environ), collective_timeout_s=30.0)
    dist.barrier()
    time.sleep(context.info.rank)
    left = time.monotonic()  # One clock for all processes of the machine.
    setup.finish(context)
    return time.monotonic() if context.info.rank == 0 else left


def work_on_an_unfit_node(folder: str) -> tuple[int, list[tuple[int, ...]]]:
    """Run the worker of a rank whose GPU does not answer; return its code and the nodes that were blamed."""
    blamed = []

    def report(info: RankInfo, backend: str) -> tuple[torch.device, str, DeviceReport]:
        raise DevicesError("its GPU is gone.", hint="", nodes=[0])

    def blame(info: RankInfo, run: RunFolder, config: dict[str, Any], refused: DevicesError) -> None:
        blamed.append(refused.nodes)

    setup.report_device = report
    preflight.exclude_conflicting_nodes = blame
    return rank_main.main(folder), blamed
