"""Rank programs of the GPU tests. Each runs in a separate process, and only that process touches CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state import staging
from slurmddp.checkpoint.state.mapped_tensor import MappedTensor
from slurmddp.checkpoint.state.staging import Snapshot, StagingBuffers
from slurmddp.environments.detect import detect
from slurmddp.environments.rank_info import RankInfo
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.strategies import build
from slurmddp.training.device.choice import choose_backend, choose_device
from slurmddp.training.distributon import Distributon
from slurmddp.training.preflight import checks, pairs, preflight
from slurmddp.training.process_group import device_agreement, setup
from support.distributed import contract_jobs
from support.distributed.checkpoint_files import newest_copy
from support.distributed.rank_jobs import Net, batch_of, step_on, weights


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """Call a rank program that was written for CPUs on the GPU of this rank.

    If there are fewer GPUs than ranks, ranks share a GPU. slurmddp and NCCL refuse that, so they use gloo.
    """
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)

    device_agreement.take_device = lambda info, backend: (device, "nccl" if ranks <= gpus else "gloo")
    device_agreement.identity_of = lambda device: ""
    device_agreement.lacks_gpus = lambda info: False
    return function(*args)


def place_of_a_rank(visible: str | None) -> dict[str, Any]:
    """Return the device of a rank under a value of CUDA_VISIBLE_DEVICES."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    with Distributon() as d:
        d.launch()
        made = torch.ones(3, device=d.device) * 2
        return {"device": str(d.device), "current": torch.cuda.is_available(), "sum": float(made.sum())}


def name_of_gpu() -> str:
    """Return the UUID of the first GPU, in the form of nvidia-smi."""
    return "GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")


def choices() -> dict[str, Any]:
    """Return the device that is chosen for one rank, from the devices that torch sees."""
    info = detect(os.environ)
    index = choose_device(info, os.environ, torch.cuda.device_count())
    return {"index": index, "backend": choose_backend("auto", index)}


def nccl_group_of_one() -> dict[str, Any]:
    """Train in a group of one NCCL rank with the wrapper of larger groups; compare it with the bare model."""
    context = setup.RankContext(
        RankInfo(environment="single"), torch.device("cuda", 0), "nccl", None, contextlib.ExitStack()
    )
    torch.cuda.set_device(0)
    context = setup._join_group(context, torch.distributed.HashStore(), 60)
    torch.manual_seed(0)
    net = Net().to(context.device)
    alone = Net().to(context.device)
    alone.load_state_dict(weights(net))
    strategy = build("ddp")
    model = strategy.wrap(net, context.device)

    for wrapped, module in ((model, net), (alone, alone)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(4):
            x, y = batch_of(step)
            step_on(wrapped, optimizer, x.cuda(), y.cuda())

    results = {
        "backend": torch.distributed.get_backend(),
        "same": all(
            torch.equal(a, b) for a, b in zip(weights(net).values(), weights(alone).values(), strict=True)
        ),
        "sum": pairs.reduce_all(context.device),
    }
    setup.finish(context)
    return results


def training_in_group_of_one(
    name: str, options: dict[str, Any], backend: str = "nccl", device: str = "cuda:0"
) -> dict[str, Any]:
    """Train by a strategy in a group of one rank, so that its collectives run over the backend."""
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    training = contract_jobs.trained(build(name, **options), device=torch.device(device))
    torch.distributed.destroy_process_group()
    return training


def preflight_of_one(folder: str) -> dict[str, Any]:
    """Run a preflight on the GPU; return for each dtype whether the GPU multiplies matrices correctly."""
    os.environ["SLURMDDP_ATTEMPT"] = "0"
    with Distributon() as d:
        d.launch()
        preflight.run(d._session.context, RunFolder(folder), {})
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        return {str(kind): checks.multiplies_right(d.device, kind) for kind in kinds}


# Copies of a state into memory that is allocated once.


def state_on_device() -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    wide = torch.randn(257, 129, generator=generator, device="cuda")
    return {
        "model": {
            "wide": wide,
            "turned": wide.t(),
            "half": wide.bfloat16(),
            "whole": torch.arange(1000, device="cuda"),
            "one": torch.tensor(7.0, device="cuda"),
            "none": torch.empty(0, 4, device="cuda"),
            "conjugated": torch.complex(wide, wide * 2).conj(),
            "here": torch.arange(5),
        },
        "step": 3,
    }


def copies_into_memory(root: str) -> dict[str, Any]:
    """Copy a state twice, and change it after each copy.

    Return whether each copy holds the state before the change.
    """
    snapshots = StagingBuffers()
    results = {}
    state = state_on_device()

    for step in (1, 2):
        expected = {name: value.cpu().resolve_conj().clone() for name, value in state["model"].items()}
        snapshots.copy(Snapshot(Path(root), step, step, state, {}))
        state["model"]["wide"].add_(1)  # the next step, queued on the device right after the copy
        newest = newest_copy(snapshots, Path(root))
        assert newest is not None
        with shared_buffer.mapped(*newest) as parts:
            read = staging.read_state(step, parts).state["model"]
        results[f"step {step}"] = all(torch.equal(read[name], value) for name, value in expected.items())
        results[f"dtypes {step}"] = all(read[name].dtype == value.dtype for name, value in expected.items())

    results["pinned"] = [slot.view is not None and slot.view.is_pinned for slot in snapshots._slots]
    snapshots.close()
    torch.cuda.synchronize()
    results["after"] = float(torch.ones(4, device="cuda").sum())
    return results


def copies_what_another_stream_still_computes(root: str) -> list[bool]:
    """Copy a tensor that another stream is changing; return whether the change is in each copy."""
    snapshots = StagingBuffers()
    results = []
    weight = torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    for step in (1, 2, 3):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            weight.fill_(step)

        snapshots.copy(Snapshot(Path(root), step, step, {"weight": weight}, {}))
        newest = newest_copy(snapshots, Path(root))
        assert newest is not None
        with shared_buffer.mapped(*newest) as parts:
            results.append(bool((staging.read_state(step, parts).state["weight"] == step).all()))

    snapshots.close()
    return results


def copies_into_memory_that_cuda_refuses() -> dict[str, Any]:
    """Copy into memory that is registered already, which CUDA does not do twice; then compute again."""
    descriptor = shared_buffer.create()
    view = MappedTensor(shared_buffer.reserve(descriptor, 1 << 20))
    torch.cuda.cudart().cudaHostRegister(view.bytes.data_ptr(), len(view.bytes), 0)
    weight = torch.arange(9.0, device="cuda")
    view.copy([weight], 0)
    copied = view.bytes[:36].view(torch.float32).tolist()
    results = {"pinned": view.is_pinned, "copied": copied, "after": (weight + 1).tolist()}
    torch.cuda.cudart().cudaHostUnregister(view.bytes.data_ptr())
    view.close()
    os.close(descriptor)
    return results
