"""Backends by name, import path and device, checked before any rank waits for another."""

from __future__ import annotations

from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import distributed

from slurmddp.errors import ConfigError
from slurmddp.settings.spec import BACKENDS
from slurmddp.transports.device_group import DeviceGroup
from slurmddp.transports.registry import TRANSPORTS, _for_each_device, known_backends, register
from support.distributed import group_jobs
from support.distributed.ranks import run_ranks


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("gllo", "'gllo' is not known"),
        ("support.own.transport.Messagse", "has no 'Messagse'"),
        ("support.own.transport.Deaf", "has no recv"),
        ("support.own.transport.HalfGroup", "has no broadcast and no allgather and no barrier"),
        ("support.own.transport.not_a_class", "can't be called"),
        ("support.own.transport.Messages.send", "not a class"),
        ("cpu:support.own.transport.Messages,cuda:ucc", "combines ucc with"),
    ],
)
def test_g3_a_backend_that_cant_work_is_refused_by_name(backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        register(backend)
    if backend == "gllo":
        assert "gloo" in caught.value.hint


def test_backends_of_torch_that_are_plugins_are_built_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def create(options: Any, backend_options: object) -> distributed.ProcessGroupGloo:
        built.append(options)
        return distributed.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )

    plugins = distributed.Backend._plugins
    for name in ("GLOO", "NCCL"):
        monkeypatch.setitem(plugins, name, distributed.Backend._BackendPlugin(create, True))
    registered = set(plugins)

    assert register("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert set(plugins) == registered
    group = _for_each_device({"cpu": "nccl"})(distributed.HashStore(), 0, 1, timedelta(seconds=60))
    group.allreduce([torch.ones(1)]).wait()
    assert [options.timeout for options in built] == [timedelta(seconds=60)]


def test_torch_finds_the_shipped_transports_by_entry_points() -> None:
    points = {point.name: point for point in entry_points(group="torch.distributed.backends")}
    for name in TRANSPORTS:
        points[name].load()()
        assert name.upper() in distributed.Backend._plugins


def test_the_names_that_a_submission_accepts_are_the_ones_of_the_ranks() -> None:
    names = {name for name in known_backends() if "." not in name}
    assert {"auto", *names} == set(BACKENDS)


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_g3_a_class_that_cant_be_built_says_why_and_a_device_string_trains() -> None:
    errors = run_ranks(group_jobs.fails, 2, "support.own.transport.Unbuildable")
    # The store ends with rank 0, so the other rank may find rank 0 gone before it builds its own.
    assert "can't be built on rank 0: OSError: no such fabric" in errors[0] and errors[1]
    mixed = "cpu:support.own.transport.Messages,meta:gloo"
    ended = run_ranks(group_jobs.trained, 2, mixed)
    assert ended[0] == ended[1] and ended[0][0] == mixed.lower()


def test_g3_each_operation_goes_to_the_group_of_its_device() -> None:
    calls: list[str] = []

    class Recording(distributed.ProcessGroup):
        def __init__(self, name: str) -> None:
            super().__init__(0, 1)
            self.called_as = name

        def allreduce(self, tensors: object, opts: object = None) -> None:
            calls.append(self.called_as)

        barrier = allreduce

    group = DeviceGroup({"cpu": Recording("cpu"), "meta": Recording("meta")})
    group.allreduce([torch.ones(1, device="meta")])
    group.allreduce([torch.ones(1)])
    group.barrier(None)
    assert calls == ["meta", "cpu", "cpu"]
    with pytest.raises(AttributeError):
        DeviceGroup({"cpu": Recording("cpu")}).no_such_operation  # noqa: B018
