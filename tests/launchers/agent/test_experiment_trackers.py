"""The ids of trackers: one for all attempts of a run, and for no other run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slurmddp.launchers.agent.experiment_trackers import tracker_environment
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import make_run, start_agent


def begun(path: Path, time: float = 1.0) -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.attempts_file.write_text(json.dumps({"event": "submitted", "time": time}) + "\n")
    return folder


def test_later_attempts_have_the_id_of_the_first(tmp_path: Path) -> None:
    folder = begun(tmp_path / "gpt-0123abcd")
    first = tracker_environment(folder, {})
    folder.add_event("started", attempt=1)
    assert tracker_environment(folder, {}) == first
    assert first["WANDB_RUN_ID"].startswith("gpt-0123abcd-")
    assert first["WANDB_RESUME"] == "allow"


def test_runs_of_one_name_that_began_at_other_times_are_two(tmp_path: Path) -> None:
    ada = tracker_environment(begun(tmp_path / "ada" / "gpt-0123abcd", time=1.0), {})
    bob = tracker_environment(begun(tmp_path / "bob" / "gpt-0123abcd", time=2.0), {})
    for name in ("WANDB_RUN_ID", "COMET_EXPERIMENT_KEY", "NEPTUNE_CUSTOM_RUN_ID"):
        assert ada[name] != bob[name]


@pytest.mark.parametrize("name", ["gpt-0123abcd", "a b/c?d:%#".replace("/", "_"), "x" * 90 + "-0123abcd"])
def test_ids_are_such_as_the_trackers_take(tmp_path: Path, name: str) -> None:
    values = tracker_environment(begun(tmp_path / name), {})
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", values["WANDB_RUN_ID"])
    assert re.fullmatch(r"[a-z0-9]{32,50}", values["COMET_EXPERIMENT_KEY"])
    assert re.fullmatch(r"[a-z0-9]{1,36}", values["NEPTUNE_CUSTOM_RUN_ID"])


def test_what_a_person_has_set_stays(tmp_path: Path) -> None:
    folder = begun(tmp_path / "gpt-1")
    given = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must", "NEPTUNE_MODE": "offline"}
    assert set(tracker_environment(folder, given)) == {"COMET_EXPERIMENT_KEY"}


def test_every_rank_of_every_attempt_is_told(tmp_path: Path) -> None:
    program = (
        "import json, os\ndef main(run_dir):\n"
        "    print(json.dumps([os.environ['WANDB_RUN_ID'], os.environ['WANDB_RESUME'],"
        " os.environ['COMET_EXPERIMENT_KEY']]))\n    return 0\n"
    )
    folder = make_run(tmp_path, program)
    folder.add_event("submitted", job_id="1")
    for attempt in (0, 1):
        with start_agent(folder, attempt=attempt, COMET_EXPERIMENT_KEY="mine") as agent:
            assert agent.wait(timeout=240) == 0
    told = {folder.rank_log(attempt, rank).read_text() for attempt in (0, 1) for rank in (0, 1)}
    expected = tracker_environment(folder, {})
    assert told == {json.dumps([expected["WANDB_RUN_ID"], "allow", "mine"]) + "\n"}
