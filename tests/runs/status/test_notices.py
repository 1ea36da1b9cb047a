"""Hangs and slow ranks in `status` and in the live view."""

from __future__ import annotations

import io

import pytest

from slurmddp.cli.live_view import RunView
from slurmddp.cli.main import main
from slurmddp.runs.status.notices import Notice, notices
from support.runs.cli_runs import start, submit
from support.runs.run_events import event

pytestmark = pytest.mark.usefixtures("elsewhere")
STALL = {"restart_count": 0, "rank": 3, "host": "n2", "phase": "data", "step": 120, "seconds": 94.2}


def test_status_shows_a_hang_and_slow_ranks_of_the_newest_attempt(make_run, slurm, capsys):
    run = make_run()
    submit(run)
    start(run)
    run.add_event("straggler", attempt=0, rank=1, host="n1", text="slowest: rank 1 on n1")
    start(run, attempt=1)
    run.add_event("stalled", attempt=1, **STALL | {"rank": 2})
    run.add_event("rank_failed", attempt=1, rank=2, host="n2", reason="stalled: waiting for data for 94 s")
    run.add_event("stalled", attempt=1, **STALL)
    run.add_event("straggler", attempt=1, rank=5, host="n2", text="slowest: rank 5 on n2")
    slurm.set_state("7", "RUNNING")
    assert main(["status", run.name]) == 0
    out = capsys.readouterr().out
    assert (
        "  stalled    rank 3 on n2 made no progress for 94 s, waiting for data, after step 120; "
        "the ranks are being ended\n"
    ) in out
    assert "  slow       slowest: rank 5 on n2\n" in out
    assert "rank 1" not in out
    run.add_event("rank_failed", attempt=1, rank=3, host="n2", reason="stalled: waiting for data for 94 s")
    assert main(["status", run.name]) == 0
    assert "made no progress" not in capsys.readouterr().out, "the hang is shown once, as a failure"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"spare": [2, 3]}, "after restart 2, the ranks run with spare nodes 2, 3"),
        ({"nodes": 1}, "after restart 2, the ranks run on 1 node"),
    ],
)
def test_ranks_that_restarted_on_other_nodes_are_placed(facts, text):
    restarts = [
        event("restarted", 1.0, 0, restart_count=1),
        event("restarted", 2.0, 0, generation=2, **facts),
    ]
    assert list(notices(restarts)) == [Notice("places", text)]


def test_the_live_view_shows_a_notice_once(make_run):
    run, out = make_run(), io.StringIO()
    with RunView(run, 400, stream=out) as view:
        run.add_event("stalled", attempt=0, **STALL | {"phase": "saving"})
        view.tick()
        assert view.progress.activity == "rank 3 on n2 hangs: ending the ranks"
        run.add_event("rank_failed", attempt=0, rank=3, host="n2", reason="stalled: saving for 94 s")
        run.add_event("straggler", attempt=0, rank=5, host="n2", text="slowest: rank 5 on n2")
    assert out.getvalue() == "rank 3 on n2 stalled: saving for 94 s\nslowest: rank 5 on n2\n"


def test_warnings_of_the_newest_attempt_are_shown_once_each():
    texts = ["torch sees none.", "torch sees none.", *(f"too short by {number} s." for number in range(4))]
    events = [event("warned", 1.0, 0, text="n1: of an earlier attempt.")]
    events += [event("warned", 2.0, 1, text=text) for text in texts]
    assert list(notices(events)) == [Notice("warned", text) for text in texts[1:]]
