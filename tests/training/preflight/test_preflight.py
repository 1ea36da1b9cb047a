"""The preflight: its findings, the nodes at fault, and the nodes that the next attempt avoids."""

from __future__ import annotations

import json
import resource
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.runs.folder.excluded_nodes import excluded_nodes
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.preflight import verdicts
from slurmddp.training.preflight.checks import NOBODY, NODE, RUN, check_limits
from slurmddp.training.preflight.pairs import faulty_nodes, rounds
from support.distributed import preflight_jobs, worker_jobs
from support.distributed.ranks import node_environments, run_ranks
from support.runs.agent_runs import events

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.log_dir(0).mkdir(parents=True)
    return folder


def fly(run: RunFolder, job: Any, *given: Any, nodes: int = 2, each: int = 1) -> list[Any]:
    places = node_environments(nodes, each, run.path)
    return run_ranks(job, len(places), str(run.path), *given, environments=places)


def avoided(run: RunFolder) -> list[dict[str, Any]]:
    if not run.excluded_file.exists():
        return []
    return [json.loads(line) for line in run.excluded_file.read_text().splitlines()]


# On ranks.


def test_healthy_nodes_pass_and_it_is_recorded(run: RunFolder) -> None:
    assert fly(run, preflight_jobs.fly, {"train": {"workers": 0}}, nodes=3) == [("", 0, "")] * 3
    (event,) = events(run, "preflight")
    assert (event["attempt"], event["nodes"], event["failed"]) == (0, 3, [])
    assert event["seconds"] > 0
    assert avoided(run) == []
    assert not [event for event in events(run, "warned") if "clock" in event["text"]]


def test_two_nodes_measure_the_run_folder_and_it_is_recorded(run: RunFolder) -> None:
    before = sorted(run.path.iterdir())
    assert fly(run, preflight_jobs.fly, nodes=3, each=2) == [("", 0, "")] * 6
    (event,) = events(run, "preflight")
    files = event["files"]
    assert [view["host"] for view in files["hosts"]] == ["n1", "n2"]
    for view in files["hosts"]:
        assert [*view["seen_s"]] == ["listing", "grown", "replaced", "removed"]
        assert None not in view["seen_s"].values() and view["unseen"] == []
    assert files["lines"] > 1
    assert (files["lost_lines"], files["broken_reads"], files["flock"]) == (0, 0, "excludes")
    assert {path.name for path in run.path.iterdir()} - {path.name for path in before} == {"attempts.jsonl"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("sees nothing", "did not see"),
        ("replaces in place", "a rename is not atomic"),
        ("loses lines", "lines that 2 hosts appended at once"),
        ("creates again", "created by several hosts at once"),
    ],
)
def test_a_run_folder_that_does_not_give_what_a_run_needs_fails_the_run(
    run: RunFolder, fault: str, text: str, rank: int
) -> None:
    for kind, code, said in fly(run, preflight_jobs.with_a_faulty_file_system, rank, fault):
        assert (kind, code) == ("SlurmddpError", 1)
        assert said.startswith("Preflight: run folder: ") and text in said
        assert "runs_dir=/another/folder" in said
    (event,) = events(run, "preflight")
    assert text in event["failed"][0] and "unfit" not in event
    assert len(event["files"]["hosts"]) == 2
    assert avoided(run) == []


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("locks here alone", "A lock (flock) of one host does not keep other hosts out."),
        ("sees changes after a touch", "Changes of another host are seen only after 0.1 s or more on n2."),
    ],
)
def test_a_run_folder_that_a_run_can_cope_with_is_warned_of(run: RunFolder, fault: str, text: str) -> None:
    assert fly(run, preflight_jobs.with_a_faulty_file_system, 1, fault) == [("", 0, "")] * 2
    (event,) = events(run, "preflight")
    assert event["failed"] == []
    assert [text in event["text"] for event in events(run, "warned")].count(True) == 1


def test_a_run_folder_that_a_node_can_not_write_to_fails_the_run(run: RunFolder) -> None:
    for kind, code, said in fly(run, preflight_jobs.with_a_node_that_can_not_write, 1):
        assert (kind, code) == ("SlurmddpError", 1)
        assert "run folder: its file system could not be measured from n" in said
        assert "n2: [Errno 30] Read-only file system" in said


def test_a_single_rank_checks_its_node(run: RunFolder) -> None:
    assert run_ranks(preflight_jobs.fly, 1, str(run.path)) == [("", 0, "")]
    assert len(events(run, "preflight")) == 1


def test_a_wrong_device_excludes_its_node(run: RunFolder) -> None:
    """Rank 3 is the second one of n2; all four leave, with the code that asks for other nodes."""
    answers = fly(run, preflight_jobs.with_a_bad_device, 3, 5, nodes=2, each=2)
    found = "n2: cpu of rank 3 multiplies matrices wrongly in torch.float32. Have the device examined."
    said = f"Preflight: {found} The next attempt runs on other nodes than n2."
    assert answers == [("UnhealthyNodeError", 76, said)] * 4
    (entry,) = avoided(run)
    assert list(entry) == ["time", "node", "reason", "found_by", "expires"]
    assert (entry["node"], entry["expires"] - entry["time"]) == ("n2", 5 * 3600)
    assert entry["reason"].startswith("preflight: cpu of rank 3 multiplies")
    assert excluded_nodes(run) == ["n2"]
    (event,) = events(run, "preflight")
    assert (event["failed"], event["restart_count"], list(event["unfit"])) == ([found], 0, ["1"])
    assert event["unfit"]["1"].startswith("cpu of rank 3 multiplies")


def test_without_exclusion_the_run_fails(run: RunFolder) -> None:
    for kind, code, said in fly(run, preflight_jobs.with_a_bad_device, 1, 0):
        assert (kind, code) == ("SlurmddpError", 1)
        assert "n2: cpu of rank 1" in said
        assert "No node was excluded" in said
    assert avoided(run) == []
    (event,) = events(run, "preflight")
    assert list(event["unfit"]) == ["1"], "a spare of this job may replace it"


FAULTS = {
    "a hanging device": (
        (preflight_jobs.with_a_device_that_hangs, 0),
        ["n1"],
        "n1: the check of its device failed on rank 0: TimeoutError: it did not end within",
    ),
    "a check that raises": (
        (preflight_jobs.with_a_check_that_raises, 1),
        ["n2"],
        "n2: the check of its device failed on rank 1: MemoryError: no more of it.",
    ),
    "a read-only TMPDIR": (
        (preflight_jobs.with_tmpdir, 1, "/proc"),
        ["n2"],
        "n2: /proc (TMPDIR) can't be written to",
    ),
    "a read-only /tmp, which Python would skip": (
        (preflight_jobs.with_a_full_tmp, 1, "/proc"),
        ["n2"],
        "n2: /proc (TMPDIR) can't be written to",
    ),
    "a full run folder": (
        (preflight_jobs.with_a_full_run_disk,),
        [],
        "17 bytes are free in the run folder; a training needs 104.9 MB.",
    ),
    "a node that damages numbers, in two of three pairs": (
        (preflight_jobs.with_a_node_that_damages, 1),
        ["n2"],
        "n2: it does not exchange data with n1, n3: the received numbers differ from the sent numbers.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_name_a_fault(run: RunFolder, fault: str) -> None:
    job, excluded, text = FAULTS[fault]
    for kind, code, said in fly(run, *job, nodes=3):
        assert (kind, code) == (("UnhealthyNodeError", 76) if excluded else ("SlurmddpError", 1))
        assert text in said
    assert excluded_nodes(run) == excluded


def test_a_missing_tmp_is_skipped(run: RunFolder) -> None:
    assert fly(run, preflight_jobs.with_a_full_tmp, 1, "/nowhere") == [("", 0, "")] * 2


def test_a_missing_tmpdir_is_warned_of(run: RunFolder) -> None:
    assert fly(run, preflight_jobs.with_tmpdir, 1, "/login/node") == [("", 0, "")] * 2
    told = [event["text"] for event in events(run, "warned")]
    assert any("n2: TMPDIR is /login/node, which is no folder on this node" in text for text in told)


@pytest.mark.parametrize(
    ("before", "excluded", "said"),
    [
        ([], "n2", "n2: it does not exchange data with n1: {why} The faulty node may also be n1."),
        (
            ["n1"],
            "n1",
            "n1: it does not exchange data with n2: {why} In an earlier preflight of this attempt, it failed "
            "with another node.",
        ),
    ],
    ids=["the message names both", "a spare has replaced the wrong node"],
)
def test_if_two_nodes_fail_with_each_other(
    run: RunFolder, before: list[str], excluded: str, said: str
) -> None:
    run.add_event("preflight", attempt=1, restart_count=0, pairs=[["n2", "n7"]])
    run.add_event("preflight", attempt=0, restart_count=0, pairs=[[node, "n7"] for node in before])
    for kind, _, told in fly(run, preflight_jobs.with_a_silent_node, 0):
        assert kind == "UnhealthyNodeError"
        assert told.startswith(f"Preflight: {said.format(why='it did not end within 0 s.')} Have its network")
    assert excluded_nodes(run) == [excluded]
    event = events(run, "preflight")[-1]
    assert (list(event["unfit"]), event["pairs"]) == ([str(int(excluded[1]) - 1)], [["n1", "n2"]])


def test_a_damaged_record_keeps_no_node_from_being_found(run: RunFolder) -> None:
    run.attempts_file.write_text("damaged\n")
    for kind, _, said in fly(run, preflight_jobs.with_a_silent_node, 0):
        assert kind == "UnhealthyNodeError", said
    assert len(excluded_nodes(run)) == 1


@pytest.mark.parametrize(("ahead_s", "kind"), [(-3600.0, ""), (3600.0, ""), (3600.0, "UnhealthyNodeError")])
def test_a_wrong_clock_is_warned_of_and_a_very_wrong_clock_refused(
    run: RunFolder, ahead_s: float, kind: str
) -> None:
    refused_s = verdicts.SKEW_REFUSED_S if kind else 7200.0
    answers = fly(run, preflight_jobs.with_a_clock, 1, ahead_s, refused_s, nodes=3)
    assert {answer[0] for answer in answers} == {kind}
    told = [event["text"] for event in events(run, "warned")] if not kind else [answers[0][2]]
    (said,) = [text for text in told if "clock" in text]
    assert "n2: its clock is " in said
    assert f"s {'ahead of' if ahead_s > 0 else 'behind'} most others." in said
    assert excluded_nodes(run) == (["n2"] if kind else [])


@pytest.mark.parametrize(
    ("config", "told", "looks"),
    [
        ({}, "1", 0),
        ({"preflight": False}, "1", 0),
        ({"preflight": True}, "1", 1),
        ({"preflight": True}, "0", 0),
    ],
)
def test_the_preflight_runs_if_the_config_and_the_agent_say_so(
    run: RunFolder, config: dict[str, Any], told: str, looks: int
) -> None:
    worker_jobs.write_config(run, **config)
    place = {"SLURMDDP_RESTART_COUNT": "1", "SLURMDDP_PREFLIGHT": told}
    ((code, said),) = run_ranks(worker_jobs.work, 1, str(run.path), environments=[place])
    assert code == 0
    assert "seed 3" in said
    assert len(events(run, "preflight") if run.attempts_file.exists() else []) == looks


# Decisions.


@pytest.mark.parametrize("nodes", range(1, 9))
def test_few_nodes_form_all_pairs_one_at_a_time(nodes: int) -> None:
    met = rounds(nodes)
    assert sorted(pair for pairs in met for pair in pairs) == list(combinations(range(nodes), 2))
    for pairs in met:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("nodes", [9, 16, 17, 100, 1024])
def test_many_nodes_form_pairs_with_neighbours_in_few_rounds(nodes: int) -> None:
    met = rounds(nodes)
    assert len(met) == (nodes - 1).bit_length()
    for pairs in met:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert {node for pairs in met for pair in pairs for node in pair} == set(range(nodes))


def test_the_node_in_most_failed_pairs_is_at_fault() -> None:
    assert faulty_nodes([]) == []
    assert faulty_nodes([(0, 2), (1, 2), (2, 3)]) == [2]
    assert faulty_nodes([(0, 1)]) == [1]
    assert faulty_nodes([(0, 2), (1, 2), (3, 5), (3, 4)]) == [3, 2]
    assert faulty_nodes([(0, 1)], {0}) == [0]
    assert faulty_nodes([(0, 2), (1, 2)], {0}) == [2]


def test_a_node_that_failed_only_with_a_faulty_node_is_no_suspect() -> None:
    told = {"event": "preflight", "attempt": 2}
    events = [
        {**told, "restart_count": 0, "pairs": [["a", "c"], ["b", "c"]]},
        {**told, "restart_count": 1, "pairs": [["b", "d"]]},
        {**told, "restart_count": 2},
    ]
    assert verdicts.suspects(events, 2, ["a", "b", "e"]) == {1}
    assert verdicts.suspects(events, 3, ["a", "b", "e"]) == set()


def test_if_most_nodes_fail_it_is_the_runs_fault() -> None:
    names = ["a", "b", "c"]
    (found,) = verdicts.find_faulty({(0, 1): "silent", (1, 2): "silent"}, names)
    assert (found.node, found.fault) == ("b", NODE)
    everywhere = verdicts.find_faulty(dict.fromkeys(combinations(range(3), 2), "silent"), names)
    assert {finding.fault for finding in everywhere} == {RUN}


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"emulated": True}, False),
        ({"environment": "torchrun"}, False),
        ({"hosts": ("a", "b", "x")}, False),
        ({"nodes": 1, "hosts": ("c",)}, True),
        ({"nodes": 2, "hosts": ("b", "c")}, True),
    ],
)
def test_only_nodes_that_slurm_knows_are_excluded(changes: dict[str, Any], known: bool) -> None:
    given = {"environment": "slurm", "nodes": 3, "hosts": ("a", "b", "c"), **changes}
    assert verdicts.can_exclude({"c": "why"}, RankInfo(**given)) is known
    assert not verdicts.can_exclude({"b": "why", "c": "why"}, RankInfo(**given)), "most nodes have failed"


def test_a_slow_machine_causes_no_warning_of_its_clock() -> None:
    """A stamp counts only if it lies outside the interval of rank 0's clock."""
    names = ["a", "b", "c"]
    assert verdicts.check_clocks(names, [100.0, 119.0, 101.0], 100.0, 120.0) == []
    (found,) = verdicts.check_clocks(names, [100.0, 123.5, 101.0], 100.0, 120.0)
    assert (found.node, found.fault) == ("b", NOBODY)
    assert "3.5 s ahead of" in found.text
    found_zero = verdicts.check_clocks(names, [100.0, 190.0, 191.0], 100.0, 101.0)
    assert [(one.node, one.fault) for one in found_zero] == [("a", NODE)], "rank 0's clock may be wrong"


def test_low_limits_are_warned_of() -> None:
    unlimited = resource.RLIM_INFINITY
    fine = {"files": 4096, "locked": unlimited, "shm": 10 << 30, "workers": 8}
    assert list(check_limits("n1", **fine)) == []
    assert list(check_limits("n1", **{**fine, "files": unlimited, "shm": None})) == []
    for name, value, hint in (("files", 1024, "ulimit"), ("locked", 65536, "memlock"), ("shm", 1, "workers")):
        (found,) = check_limits("n1", **{**fine, name: value})
        assert (found.node, found.fault) == ("n1", NOBODY)
        assert hint in found.hint


def test_nodes_exchange_numbers_where_the_group_sends_from_the_cpu_alone() -> None:
    assert run_ranks(preflight_jobs.exchanged_through_the_cpu, 2) == [None, None]
