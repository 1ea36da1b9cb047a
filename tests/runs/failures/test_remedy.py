"""The first sentence about a failure has the remedy that the rank or agent reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.host.heartbeat_page import HeartbeatPage, ReportedError
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, as_error, as_json, describe, from_facts, from_json
from slurmddp.runs.failures.kinds import PHRASES
from support.runs.agent_runs import make_run, start_agent

TOO_FEW = "ConfigError: The data set has 5 samples"
PROGRAM = """
import sys
from slurmddp.errors import ConfigError
def main(run_dir):
    {}
"""
HINT = "Use a smaller batch."


@pytest.mark.parametrize(
    ("line", "code", "reason", "remedy"),
    [
        (f"raise ConfigError('The data set has 5 samples.', hint={HINT!r})", 78,
         "The data set has 5 samples", HINT),
        ("sys.exit('no data in /x')", 1, "no data in /x", ""),
        (f"print('ConfigError: 5 samples.\\n{HINT}'); return 3", 3, "ConfigError: 5 samples", ""),
    ],
    ids=["refusal", "sys.exit", "only printed"],
)  # fmt: skip
def test_only_what_a_rank_reports_is_its_remedy(
    tmp_path: Path, line: str, code: int, reason: str, remedy: str
) -> None:
    folder = make_run(tmp_path, PROGRAM.format(line), ranks_per_node=1)
    assert start_agent(folder, nodes=1, node_rank=0).wait(timeout=120) == (code if code == 78 else 1)
    failure = capture.read(folder, 0)
    assert failure is not None
    assert (failure.exit_code, failure.kind, failure.reason, failure.remedy) == (
        code,
        "other",
        reason,
        remedy,
    )


def test_the_first_sentence_holds_the_remedy_also_if_the_lines_were_shown_before() -> None:
    failure = Failure(rank=1, host="c07", exit_code=78, signal=None, reason=TOO_FEW, remedy=HINT)
    sentence = f"Rank 1 on c07 refused to continue (exit code 78): {TOO_FEW}. Use a smaller batch."
    assert describe(failure) == sentence
    assert as_error(failure, Path("rank-1.log"), with_lines=False).message == sentence
    cut_off = replace(failure, reason="Older checkpoints are unto...")
    assert "unto... Use a smaller batch." in describe(cut_off)


def test_the_page_of_a_rank_holds_the_error_by_which_it_ends_and_not_that_of_the_rank_before() -> None:
    page = HeartbeatPage.create()
    assert page.reported_error() is None
    reported = ReportedError("ConfigError: \u00fc" + "\u20ac" * 10_000, "Give a number.", is_lost_rank=True)
    page.report_error(reported)
    read = page.reported_error()
    assert read is not None and reported.text.startswith(read.text) and len(read.text) > 400
    assert replace(read, text="") == replace(reported, text="")
    page.report_error(ReportedError("x", ""))
    assert page.reported_error() == ReportedError("x", "")
    page.reset()
    assert page.reported_error() is None
    page.close()


@pytest.mark.parametrize(
    ("reason", "kind", "sentence"),
    [
        ("stalled: saving for 94 s", "stalled", "rank 2 on n1 stalled: saving for 94 s"),
        (PHRASES["stalled_together"] + ", at a.py:7,", "stalled_together",
         "rank 2 on n1 stalled: in a collective that not all ranks have joined, at a.py:7,"),
        ("lost node: silent", "lost_node", "node 0 (n1) was lost: silent"),
        ("lost node to the preflight: hot", "unfit_node", "node 0 (n1) failed the preflight: hot"),
        ("lost node to the ranks: full", "unable_node", "node 0 (n1) can run no ranks: full"),
        ("was not started by SLURM: x", "not_started", "rank 2 on n1 was not started by SLURM: x"),
    ],
)  # fmt: skip
def test_a_record_without_a_kind_gets_its_kind_when_it_is_read(reason: str, kind: str, sentence: str) -> None:
    facts = {"rank": 2, "node_rank": 0, "host": "n1", "reason": reason}
    failure = from_facts(facts)
    assert (failure.kind, failure.sentence) == (kind, sentence)
    assert from_json(as_json(failure)) == failure, "the record keeps the kind"


@pytest.mark.parametrize(("reason", "kind"), [("lost another rank: x", "lost_peer"), ("stalled", "other")])
def test_a_process_that_ended_by_itself_was_not_stuck(reason: str, kind: str) -> None:
    failure = from_facts({"rank": 2, "host": "n1", "exit_code": 3, "reason": reason})
    assert (failure.kind, failure.reason) == (kind, reason)
