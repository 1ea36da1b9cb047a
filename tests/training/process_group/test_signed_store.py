"""Values in torch's store that another account has written are ignored with a warning, and never act."""

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
from slurmddp.training.preflight.preflight import Answer, _Flight
from slurmddp.training.process_group import rendezvous
from slurmddp.training.process_group.device_agreement import DeviceReport, settle
from slurmddp.training.process_group.rendezvous import open_store
from slurmddp.training.process_group.signed_store import SignedStore
from slurmddp.training.stopping.agreement import StopAgreement
from support.distributed.meetings import meet, rank
from support.runs.launch_ports import a_launch

pytestmark = pytest.mark.distributed
SECRET = "5e" * 32


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SLURMDDP_SECRET", SECRET)
    return SECRET


def test_what_a_rank_sets_is_what_the_others_get(secret: str) -> None:
    store = dist.HashStore()
    SignedStore(store, "1.0.0").set("key", "wert: ü\n")
    assert SignedStore(store, "1.0.0").get("key") == "wert: ü\n"
    assert SignedStore(store, "1.0.0").get_all(["other", "key"]) == [None, "wert: ü\n"]
    assert secret.encode() not in store.get("key")


def test_a_value_that_is_not_signed_for_this_key_of_this_launch_is_ignored(
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
    keys = [
        "of an earlier launch",
        "of another run",
        "replayed",
        "changed",
        "plain",
        "empty",
        "no text",
        "no mac",
    ]
    with caplog.at_level(logging.WARNING):
        assert ours.get_all(keys) == [None] * len(keys)
        assert ours.get_all(keys) == [None] * len(keys)
    assert len(caplog.records) == len(keys), "one message per key"
    assert ours.get("another") == "stop"


@pytest.mark.parametrize("forged", ["stop", b"\xff\xfe"])
def test_a_forged_value_gives_way_to_the_first_that_is_signed(secret: str, forged: str | bytes) -> None:
    store = dist.HashStore()
    store.set("key", forged)
    one, other = SignedStore(store, "1.0.0"), SignedStore(store, "1.0.0")
    assert one.compare_set("key", "first") == "first"
    assert other.compare_set("key", "second") == "first"
    assert other.get("key") == "first"


def test_a_wait_goes_on_over_a_forged_value_until_the_signed_one(secret: str) -> None:
    store = dist.HashStore()
    store.set("key", "null")
    ours = SignedStore(store, "1.0.0")
    assert ours.wait(["key"], 0.2) == [None]
    later = threading.Timer(0.2, ours.set, ("key", "value"))
    later.start()
    assert ours.wait(["key"], 60.0) == ["value"]
    later.join()


def test_without_a_secret_values_go_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMDDP_SECRET", raising=False)
    store = dist.HashStore()
    ours = SignedStore(store, "1.0.0")
    ours.set("key", "value")
    assert store.get("key") == b"value"
    assert ours.compare_set("key", "other") == "value"


def test_nobody_else_can_stop_a_training(secret: str) -> None:
    store = dist.HashStore()
    agreements = [StopAgreement(store, number, 2, poll_s=0.005, launch_id="1.0.0") for number in (0, 1)]
    store.compare_set("slurmddp/stop/1/reason", "", "because I can")
    store.add("slurmddp/stop/1/posted", 2)
    store.set("slurmddp/stop/1/started/0", "0")
    time.sleep(0.2)
    assert [one.tick() for one in agreements] == [False, False]
    assert [one.requested for one in agreements] == [False, False]
    agreements[1].request("a wish")
    with ThreadPoolExecutor(2) as pool:
        ticks = pool.map(lambda one: [one.tick() for _ in range(3000) if not time.sleep(0.001)], agreements)
    assert [True in each for each in ticks] == [True, True]
    assert agreements[0].reason == agreements[1].reason == "a wish on rank 1"
    assert agreements[0].started == agreements[1].started
    for one in agreements:
        one.close()


def test_nobody_else_can_refuse_the_devices_of_a_run(secret: str) -> None:
    store = dist.HashStore()
    store.set("slurmddp/claims", json.dumps({"text": "no", "hint": "", "nodes": []}))
    store.set("slurmddp/claims/1", json.dumps({"node": 0, "trouble": "it is broken"}))
    claim = DeviceReport(node=0, backend="gloo")
    with ThreadPoolExecutor(2) as pool:
        told = [
            pool.submit(settle, SignedStore(store, "1.0.0"), number, 2, claim, patience_s=60.0)
            for number in (1, 0)
        ]
        assert [one.result() for one in told] == [None, None]


def test_nobody_else_can_fail_a_preflight(secret: str, tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("slurmddp/preflight/own", json.dumps([["it is broken"], ["n1"]]))
    store.set("slurmddp/preflight/own/1", Answer(failed_pairs={(0, 1): "silence"}).to_json())
    flights = [_Flight(rank(number, 2), store, RunFolder(tmp_path), {}) for number in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(one.share, "own", Answer()) for one in reversed(flights)]
        assert [one.result() for one in told] == [None, None]


def test_nobody_else_can_stop_ranks_that_meet(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = rendezvous._report

    def after_a_stranger(store: SignedStore, info: object) -> None:
        if info.rank == 0:  # type: ignore[attr-defined]
            raw = store._store
            raw.set("slurmddp/verdict", "stopped")
            raw.set("slurmddp/here/1", "another host")
            raw.add("slurmddp/arrived", 5)
        report(store, info)  # type: ignore[arg-type]

    monkeypatch.setattr(rendezvous, "_report", after_a_stranger)
    launch = a_launch()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(open_store, rank(0, 3, launch), 120.0)
        time.sleep(0.5)
        assert not zero.done(), "two ranks are still missing"
        stores = meet([rank(1, 3, launch), rank(2, 3, launch)])
        zero.result().set("key", "value")
        assert [store.get("key") for store in stores] == [b"value"] * 2
