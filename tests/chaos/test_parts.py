"""The parts of `make chaos` that need no SLURM: what is drawn, what is seen, what is concluded."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import faults, table
from chaos.compare import End, difference
from chaos.faults import FAULTS, MissedError, Scene, choose, draw
from chaos.recovery import Outcome
from chaos.runner import Result, RunResult, Settings
from chaos.story import PLANNED, Story, story
from chaos.training import Lines, Shape
from slurmddp.errors import ConfigError

__all__ = ["story"]

KINDS = sorted(FAULTS)
END = End(step=3, weights="abc", losses=(3.0, 2.0, 1.0), held_out=(2.5,))


def test_the_same_seed_draws_the_same_faults_every_kind_once_in_a_round() -> None:
    assert draw(KINDS, 40, 7, 30) == draw(KINDS, 40, 7, 30)
    assert draw(KINDS, 40, 7, 30) != draw(KINDS, 40, 8, 30)
    assert PLANNED.luck().random() == PLANNED.luck().random()
    planned = draw(KINDS, 2 * len(KINDS) + 1, 3, 30)
    for start in (0, len(KINDS)):
        assert sorted(one.kind for one in planned[start : start + len(KINDS)]) == KINDS
    assert [one.number for one in planned] == list(range(len(planned)))
    assert {one.after_steps for one in planned} <= set(range(1, 31))


def test_kinds_are_chosen_by_name() -> None:
    assert choose(None, root=True, shared=True) == list(FAULTS)
    assert "stop-server" not in choose(None, root=True)
    with pytest.raises(ConfigError, match="stop-server needs a shared file system"):
        choose("stop-server", root=True)
    assert "cut-link" not in choose(None, root=False)
    assert choose("preempt, kill-rank,preempt", root=False) == ["preempt", "kill-rank"]
    with pytest.raises(ConfigError, match="kil-rank") as caught:
        choose("kil-rank", root=True)
    assert "kill-rank" in caught.value.hint
    with pytest.raises(ConfigError, match="root"):
        choose("fill-disk", root=False)
    with pytest.raises(ConfigError, match="no fault"):
        choose(" ,", root=True)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (replace(END, weights="abd"), "weights"),
        (replace(END, step=2), "step 2"),
        (replace(END, losses=(3.0, 2.5, 1.0)), "loss number 2 is 2.5"),
        (replace(END, losses=(3.0, 2.0)), "2 times"),
        (replace(END, held_out=(2.0,)), "held-out loss number 1"),
    ],
)
def test_a_difference_is_named(other: End, word: str) -> None:
    assert difference(END, END) == ""
    assert word in difference(other, END)


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    assert lines.look() == []
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n{"a":')
    assert lines.look() == [{"a": 1}, {"a": 2}]
    with path.open("a") as stream:
        stream.write(" 3}\n")
    assert lines.look() == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(("in_place", "most"), [(False, 0), (True, 100000)])
def test_ranks_restart_in_place_only_on_demand(in_place: bool, most: int) -> None:
    assert f"policy.max_restarts_in_place={most}" in Shape(in_place=in_place).overrides()


def test_a_start_is_preempted_only_before_its_first_step(story: Story) -> None:
    assert not faults._starts(story.training, 0)
    story.event("started", attempt=1, job_id="1")
    assert not faults._starts(story.training, 0)
    log = story.folder.log_dir(1) / "node-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("the agent is here\n")
    assert faults._starts(story.training, 0)
    story.event("first_step", attempt=1, step=12)
    with pytest.raises(MissedError, match="first step"):
        faults._starts(story.training, 0)


@pytest.mark.parametrize(
    ("jobs", "broken"), [({"7": "PENDING"}, ""), ({"7": "RUNNING", "8": "PENDING"}, "2 jobs")]
)
def test_commands_at_once_must_leave_one_job(
    story: Story, monkeypatch: pytest.MonkeyPatch, jobs: dict[str, str], broken: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def stop(*words: str) -> str:
        story.event("ended", attempt=0, job_id="1", outcome="stopped", exit_code=75, next="none")
        return ""

    place: Any = SimpleNamespace(command=stop, at_once=lambda *commands: asked.extend(commands))
    monkeypatch.setattr(story.training, "place", place)
    sandbox: Any = SimpleNamespace(jobs=lambda: jobs)
    struck = faults.submit_at_once(Scene(sandbox, story.training), random.Random(0))
    assert [words[0] for words in asked] == ["resume", "resume", "train"]
    assert broken in struck.broken
    assert bool(struck.broken) is bool(broken)


def test_a_result_is_good_only_if_all_of_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(kinds=("preempt",), faults=2)
    same = RunResult("run", 3, "")
    back = Outcome(0, "preempt", "run", "what", 12, "came back", 1, 4, 12.5)
    again = replace(back, lost_steps=0, recovery_s=10.5)
    good = Result(settings, outcomes=[back, again], runs=[same])
    assert good.good
    assert not replace(good, outcomes=[back]).good
    assert not replace(good, outcomes=[back, replace(again, outcome="by hand")]).good
    assert not replace(good, runs=[]).good
    assert not replace(good, runs=[same, replace(same, difference="its losses")]).good
    table.print_result(good, sys.stdout)
    printed = capsys.readouterr().out
    assert "preempt" in printed
    assert "11.5 s" in printed
    assert "2 of 2 faults survived; 1 of 1" in printed
    written = json.loads(json.dumps(table.as_json(replace(good, outcomes=[back]))))
    assert written["complete"] is False
    assert written["by_kind"]["preempt"]["lost_steps_most"] == 4


def test_damage_keeps_the_time_of_the_file(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    file = story.folder.checkpoints_dir / "step-0000000010" / "state.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 1000)
    before = file.stat()
    monkeypatch.setattr(Scene, "ranks", lambda scene: [])
    scene: Any = Scene(None, story.training)  # type: ignore[arg-type]
    struck = FAULTS["flip-bit"].inject(scene, random.Random(1))
    changed = [a ^ b for a, b in zip(file.read_bytes(), b"x" * 1000, strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0].bit_count() == 1
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert "state.json" in struck.what
    FAULTS["truncate"].inject(scene, random.Random(1))
    assert file.stat().st_size < 1000


def test_files_that_are_removed_are_logs_of_ranks_and_the_oldest_checkpoint(story: Story) -> None:
    folder = story.folder
    logs = [folder.rank_log(0, rank) for rank in (0, 1)]
    agent_log = folder.log_dir(0) / "node-0.log"
    agent_log.parent.mkdir(parents=True)
    for path in (*logs, agent_log):
        path.write_text("a line\n")
    scene: Any = Scene(None, story.training)  # type: ignore[arg-type]
    with pytest.raises(MissedError, match="one checkpoint"):
        FAULTS["remove-files"].inject(scene, random.Random(1))
    assert all(path.exists() for path in logs)

    for step in (10, 20):
        (folder.checkpoints_dir / f"step-{step:010}").mkdir(parents=True)
    struck = FAULTS["remove-files"].inject(scene, random.Random(1))
    assert [path.exists() for path in (*logs, agent_log)] == [False, False, True]
    assert [path.name for path in folder.checkpoints_dir.iterdir()] == ["step-0000000020"]
    assert struck.interrupts is None
    assert "2 logs of ranks and step-0000000010" in struck.what
