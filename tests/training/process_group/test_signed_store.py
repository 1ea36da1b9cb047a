"""Values in torch's store without a right signature are ignored with a warning."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.preflight.preflight import PartResult, _Preflight
from slurmddp.training.process_group.device_agreement import DeviceReport, agree_on_devices
from slurmddp.training.process_group.participants import Participants
from slurmddp.training.process_group.rendezvous import open_store
from slurmddp.training.process_group.signed_store import SignedStore
from slurmddp.training.stopping.agreement import StopAgreement, StopReason
from support.distributed.meetings import meet, rank
from support.runs.agent_runs import wait_until
from support.runs.launch_ports import a_launch

pytestmark = pytest.mark.distributed
SECRET = "5e" * 32


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SLURMDDP_SECRET", SECRET)
    return SECRET


def test_a_value_is_the_same_for_all_ranks(secret: str) -> None:
    store = dist.HashStore()
    SignedStore(store, "1.0.0").set("key", "wert: ü\n")
    assert SignedStore(store, "1.0.0").get("key") == "wert: ü\n"
    assert SignedStore(store, "1.0.0").get_all(["other", "key"]) == [None, "wert: ü\n"]
    assert secret.encode() not in store.get("key")


def test_a_value_without_a_signature_for_this_key_and_launch_is_ignored(
    secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    ours = SignedStore(store, "1.0.0")
    SignedStore(store, "1.0.0").set("another", "stop")
    SignedStore(store, "1.0.1").set("of an earlier launch", "stop")
    SignedStore(store, "1.0.0", "6e" * 32).set("of another run", "stop")
    store.set("replayed", store.get("another"))
    store.set("changed", store.get("another").replace(b"stop", b"go on"))
    for key, value in (("plain", "stop"), ("empty", ""), ("no text", b"\xff\xfe:\xff"), ("no mac", ":stop")):
        store.set(key, value)
    keys = ["of an earlier launch", "of another run", "replayed", "changed"]
    keys += ["plain", "empty", "no text", "no mac"]
    with caplog.at_level(logging.WARNING):
        assert ours.get_all(keys) == ours.get_all(keys) == [None] * len(keys)
    assert len(caplog.records) == len(keys), "one message per key"
    assert ours.get("another") == "stop"


@pytest.mark.parametrize("forged", ["stop", b"\xff\xfe"])
def test_compare_set_replaces_a_forged_value(secret: str, forged: str | bytes) -> None:
    store = dist.HashStore()
    store.set("key", forged)
    one, other = SignedStore(store, "1.0.0"), SignedStore(store, "1.0.0")
    assert one.compare_set("key", "first") == "first"
    assert other.compare_set("key", "second") == "first"
    assert other.get("key") == "first"


def test_a_wait_ignores_a_forged_value(secret: str) -> None:
    store = dist.HashStore()
    store.set("key", "null")
    ours = SignedStore(store, "1.0.0")
    assert ours.wait(["key"], 0.2) == [None]
    later = threading.Timer(0.2, ours.set, ("key", "value"))
    later.start()
    assert ours.wait(["key"], 60.0) == ["value"]
    later.join()


def test_without_a_secret_values_are_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMDDP_SECRET", raising=False)
    store = dist.HashStore()
    ours = SignedStore(store, "1.0.0")
    ours.set("key", "value")
    assert store.get("key") == b"value"
    assert ours.compare_set("key", "other") == "value"


def test_no_other_process_can_stop_a_training(secret: str) -> None:
    store = dist.HashStore()
    agreements = [StopAgreement(store, number, 2, poll_s=0.005, launch_id="1.0.0") for number in (0, 1)]
    store.compare_set("slurmddp/stop/1/reason", "", "because I can")
    store.add("slurmddp/stop/1/posted", 2)
    store.set("slurmddp/stop/1/started/0", "0")
    time.sleep(0.2)
    assert [one.should_stop() for one in agreements] == [False, False]
    assert [one.requested for one in agreements] == [False, False]
    agreements[1].request("a wish")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: wait_until(one.should_stop, "the agreement stops"), agreements))
    assert agreements[0].reason == agreements[1].reason == StopReason("a wish", "a wish on rank 1", 1)
    assert agreements[0]._started == agreements[1]._started
    for one in agreements:
        one.close()


def test_no_other_process_can_refuse_the_devices_of_a_run(secret: str) -> None:
    store = dist.HashStore()
    store.set("slurmddp/devices", json.dumps({"text": "no", "hint": "", "nodes": []}))
    store.set("slurmddp/devices/1", json.dumps({"node": 0, "trouble": "it is broken"}))
    report = DeviceReport(node=0, backend="gloo")
    with ThreadPoolExecutor(2) as pool:
        results = [
            pool.submit(agree_on_devices, SignedStore(store, "1.0.0"), rank(number, 2), report)
            for number in (1, 0)
        ]
        assert [result.result() for result in results] == [None, None]


def test_no_other_process_can_fail_a_preflight(secret: str, tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("slurmddp/preflight/own", json.dumps([["it is broken"], ["n1"]]))
    store.set("slurmddp/preflight/own/1", PartResult(failed_pairs={(0, 1): "silence"}).to_json())
    preflights = [_Preflight(rank(number, 2), store, RunFolder(tmp_path), {}) for number in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(preflight.share, "own", PartResult()) for preflight in reversed(preflights)]
        assert [result.result() for result in results] == [None, None]


def test_no_other_process_can_end_a_rendezvous(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join = Participants.join

    def join_after_a_forgery(self: Participants) -> None:
        if self._info.rank == 0:
            raw = self._store._store
            raw.set("slurmddp/outcome", "stopped")
            raw.set("slurmddp/joined/1", "another host")
            raw.add("slurmddp/joined", 5)
        join(self)

    monkeypatch.setattr(Participants, "join", join_after_a_forgery)
    launch = a_launch()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(open_store, rank(0, 3, launch), 120.0)
        time.sleep(0.5)
        assert not zero.done(), "two ranks are still missing"
        stores = meet([rank(1, 3, launch), rank(2, 3, launch)])
        zero.result().set("key", "value")
        assert [store.get("key") for store in stores] == [b"value"] * 2
