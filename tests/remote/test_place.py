"""Calls of functions on workers: by import path, with objects that stay there."""

from __future__ import annotations

import os

import pytest
import torch

from slurmddp import remote
from slurmddp.errors import ConfigError

FUNCTIONS = "support.distributed.remote_functions"
pytestmark = pytest.mark.distributed


def test_a_call_keeps_its_result_on_the_worker_as_an_operand_of_further_calls(w):
    counter = remote.call(f"{FUNCTIONS}.Counter", 5, node=1)
    found = remote.call(f"{FUNCTIONS}.add", counter, remote.ones(3, node=1), more={"a": 1}, node=1).fetch()
    assert (found["value"], found["pid"]) == (9, w.node(1).pid) and w.node(1).pid != os.getpid()
    assert found["tensor"].get_node() == 1 and found["tensor"].tolist() == [2.0] * 3
    told = remote.call(f"{FUNCTIONS}.values", node=1).fetch()
    assert told == [None, True, 1.5, float("inf"), "text", {"a": [1, 2]}, torch.bfloat16, 1j]
    with pytest.raises(ConfigError, match="a result on node 1 and others on node 2"):
        remote.call(f"{FUNCTIONS}.add", counter, 1, node=2)
    with pytest.raises(ConfigError, match=r"a tensor of shape \(3,\) in this process"):
        remote.call(f"{FUNCTIONS}.add", counter, torch.ones(3), node=1)
    with pytest.raises(ConfigError, match="type object can't go"):
        remote.call(f"{FUNCTIONS}.add", object(), node=1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{FUNCTIONS}.unknown", "PosixPath can't go"),
        (f"{FUNCTIONS}.nothing", "nothing"),
        ("no_such_package.f", "no_such_package"),
    ],
)
def test_a_result_or_a_path_that_cant_be_is_an_error_of_the_worker(w, name, told):
    with pytest.raises(remote.RemoteError, match=told):
        remote.call(name, node=1).fetch()


def test_seeds_are_those_of_each_worker(w):
    drawn = []
    for node in (1, 2):
        remote.call("torch.manual_seed", 3, node=node)
        drawn.append(remote.randn(4, node=node).fetch())
    assert torch.equal(*drawn) and torch.equal(
        drawn[0], torch.randn(4, generator=torch.Generator().manual_seed(3))
    )
