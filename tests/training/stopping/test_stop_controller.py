"""Every way to stop a rank of a run: file, signal, deadline, before the training and during a save."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.environments.time_limits import TimeLimits
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.stopping import stop_controller
from slurmddp.training.stopping.deadline import Measured, last_safe_moment
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals
from slurmddp.training.stopping.stop_controller import StopController
from support.distributed import stop_jobs, trainer_runs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import trainer_config
from support.runs.agent_runs import events

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


def make_run(
    path: Path,
    ranks: int = 2,
    model: str = "support.distributed.rank_jobs.Net",
    data: str = "Countdown",
    **train: Any,
) -> RunFolder:
    settings = {"steps": 100_000, "batch_size": 2, "log_every": 1000, "eval_every": 0, "save_every": 0}
    config = trainer_config(
        data={"_target_": f"support.distributed.stop_jobs.{data}"},
        train={**settings, **train},
        model={"_target_": model},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.01},
    )
    return trainer_runs.make_run(path, ranks, config)


def work(
    folder: RunFolder, act: str, at: int = 20, rank: int = 0, ranks: int = 2, **environ: str
) -> list[int]:
    return run_ranks(stop_jobs.work, ranks, str(folder.path), act, at, rank, environ)


@pytest.mark.parametrize("act", ["write_stop_file", "write_stop_file_and_signal"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_stop_file_stops_all_at_a_checkpoint(tmp_path: Path, ranks: int, act: str) -> None:
    run = make_run(tmp_path / "run", ranks)
    assert work(run, act, ranks=ranks) == [75] * ranks
    (saved,), (signalled,) = events(run, "saved"), events(run, "signalled")
    assert saved["step"] >= 10
    assert (signalled["signal"], signalled["rank"]) == ("stop_file", None)


def isolated(
    folder: RunFolder, act: str, at: int = 20, rank: int = 0, **environ: str
) -> list[tuple[int, str]]:
    return run_ranks(stop_jobs.isolated, 2, str(folder.path), act, at, rank, environ)


def test_a_signal_before_the_training_ends_the_rank_without_a_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model="support.distributed.stop_jobs.SlowToBuild")
    for code, said in isolated(run, "nothing"):
        assert code == 75
        assert "SIGTERM came before the training began: there is nothing to save." in said
    assert run.events() == [] and not run.checkpoints_dir.exists()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["StopFile", "EarlyOnOne"])
def test_a_stop_during_the_start_comes_before_any_evaluation_and_step(
    tmp_path: Path, model: str, ranks: int
) -> None:
    run = make_run(tmp_path / "run", ranks, f"support.distributed.stop_jobs.{model}", "WithHeldout")
    assert work(run, "nothing", ranks=ranks) == [75] * ranks
    (signalled,) = run.events()
    assert signalled["signal"] == ("stop_file" if model == "StopFile" else "SIGTERM")
    assert not run.metrics_file.exists() and not any(run.checkpoints_dir.iterdir())


def test_a_rank_that_stopping_ranks_have_left_stops_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model="support.distributed.stop_jobs.SlowToStart")
    assert [code for code, _ in isolated(run, "nothing")] == [75, 75]


def test_a_rank_whose_save_hangs_leaves_before_it_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model="support.distributed.stop_jobs.SlowToSave", save_every=3)
    ends = isolated(run, "terminate_all", rank=-1, SLURMDDP_KILL_WAIT_S="4")
    assert [code for code, _ in ends] == [75, 75]
    assert any("s after SIGTERM this rank has not left" in said for _, said in ends)
    assert [event["step"] for event in events(run, "saved")] == [3, 6, 9]


def test_the_end_of_the_job_stops_all_ranks_without_a_signal(run: RunFolder) -> None:
    """A save of 2872 s needs all but the first five seconds of the hour that is left."""
    run.add_event("saved", attempt=0, step=0, seconds=2872.0)
    limits = {"SLURMDDP_END_TIME": str(int(time.time()) + 3600), "SLURMDDP_KILL_WAIT_S": "30"}
    assert work(run, "nothing", **limits) == [75, 75]
    (signalled,) = events(run, "signalled")
    assert (signalled["signal"], signalled["rank"]) == ("time_limit", 0)
    assert events(run, "saved")[-1]["step"] > 0
    warned = {event["about"]: event["text"] for event in events(run, "warned")}
    assert warned.keys() == {"lead", "grace"} and "A save takes 2872 s" in warned["grace"]


def test_a_grace_that_a_save_of_this_attempt_exceeds_is_warned_of(run: RunFolder) -> None:
    assert work(run, "write_stop_file", SLURMDDP_KILL_WAIT_S="1") == [75, 75]
    assert [event["about"] for event in events(run, "warned")] == ["grace"]


@pytest.mark.parametrize(("started", "requested"), [(0, []), (1, []), (2, ["time_limit"])])
def test_the_end_of_the_job_waits_for_the_first_step(started: int, requested: list[str]) -> None:
    stops, reasons = StopController(ExitGuard(StopSignals(), TimeLimits(end_time=1))), list[str]()
    stops._agreement = SimpleNamespace(request=reasons.append)  # type: ignore[assignment]
    stops._steps = started
    stops._check_deadline(1000.0)
    assert reasons == requested


def test_a_step_counts_from_one_answer_to_the_next_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that allows for no long step comes too late for its save."""
    stops, now = StopController(ExitGuard(StopSignals(), TimeLimits(end_time=1000))), 0.0
    monkeypatch.setattr(stop_controller, "time", SimpleNamespace(monotonic=lambda: now))
    asked: list[str] = []
    stops._agreement = SimpleNamespace(should_stop=lambda: False, request=asked.append)  # type: ignore[assignment]
    for seconds, pauses, step_s in ((0.0, False, 0.0), (700.0, True, 0.0), (60.0, False, 60.0)):
        now += seconds
        if pauses:
            stops.exclude_pause()
        assert not stops.should_stop(None)  # type: ignore[arg-type]
        assert stops._pace.measured.step_s == step_s
    stops.saved(0.0)
    moment = last_safe_moment(TimeLimits(end_time=1000), Measured(save_s=0.0))
    assert moment is not None
    stops._check_deadline(moment - 121)
    assert asked == []
    stops._check_deadline(moment - 120)
    assert asked == ["time_limit"], "two steps still fit"


def test_a_save_counts_from_its_start_until_it_is_durable(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for facts in (
        {"seconds": 3.0},
        {"seconds": 0.5, "written_s": 6.0},
        {"seconds": 1.0, "written_s": "long"},
    ):
        folder.add_event("saved", step=1, **facts)
    stops = StopController(ExitGuard(StopSignals(), TimeLimits(end_time=1000, lead_s=5)))
    stops._read_saves(folder)
    assert stops._pace.measured.save_s == 6.5
    asked: list[str] = []
    stops._agreement = SimpleNamespace(request=asked.append)  # type: ignore[assignment]
    stops._steps = 2
    moment = last_safe_moment(TimeLimits(end_time=1000), Measured(save_s=6.5))
    assert moment is not None
    stops._check_deadline(moment - 1)
    assert asked == []
    stops.is_writing = lambda: True
    stops._check_deadline(moment - 1)
    assert asked == ["time_limit"], "the running write ends before the last save starts"
