"""The heartbeat of a rank: the phases of the built-in trainer, and of a user's loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from slurmddp import Distributon
from slurmddp.environments.names import HEARTBEAT_VARIABLE
from slurmddp.errors import ConfigError
from slurmddp.host.heartbeat_page import HeartbeatPage
from slurmddp.training.heartbeat import Heartbeat
from slurmddp.training.startup_timer import StartupTimer
from slurmddp.training.trainer.loop import train
from support.distributed.trainer_runs import make_run, trainer_config

pytestmark = pytest.mark.distributed


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatPage]:
    page = HeartbeatPage.create()
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(page.descriptor))
    yield page
    page.close()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the phases that are entered, one after the other."""
    phases: list[str] = []
    enter = HeartbeatPage.enter

    def note(self: HeartbeatPage, phase: str) -> float:
        phases.append(phase)
        return enter(self, phase)

    monkeypatch.setattr(HeartbeatPage, "enter", note)
    return phases


def in_turn(phases: list[str]) -> list[str]:
    return [phase for phase, _ in itertools.groupby(phases)]


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Eight samples; says what the page shows while one is read."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page, self.seen = page, []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(self.page.read().phase)
        return torch.ones(2)


def set_up(data: Data) -> tuple[Distributon, nn.Module, torch.optim.Optimizer, DataLoader]:  # type: ignore[type-arg]
    distributon = Distributon(strategy="single", seed=0).launch()
    model = distributon.setup_model(nn.Linear(2, 1))
    optimizer = distributon.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = distributon.setup_dataloader(DataLoader(data, batch_size=2))
    return distributon, model, optimizer, loader


def test_the_built_in_trainer_shows_all_phases(page: HeartbeatPage, shown: list[str], tmp_path: Path) -> None:
    config = trainer_config(
        {"_target_": "support.distributed.stop_jobs.WithHeldout"},
        {"steps": 3, "batch_size": 2, "save_every": 2, "eval_every": 2, "eval_batches": 2, "log_every": 1},
        model={"_target_": "support.distributed.rank_jobs.Net"},
    )
    folder = make_run(tmp_path / "run", 1, config)
    with Distributon(strategy="single", seed=0) as distributon:
        distributon.launch()
        assert not page.read().watched
        train(distributon, config, folder)
        beat = page.read()
    assert (beat.step, beat.steps, beat.resumed, beat.watched) == (3, 3, 0, True)
    assert 0 < beat.wait_s + beat.forward_s < beat.step_s
    phases = in_turn(shown)
    assert phases[:18] == [
        *("meeting", "loading", "saving", "loading"),  # The test save.
        *("first_step", "evaluating", "data", "first_step", "step"),
        *("data", "step", "evaluating", "saving", "evaluating"),
        *("data", "step", "evaluating", "saving"),
    ]
    assert phases[-1] == "ending"


def test_a_users_loop_shows_its_steps_and_waits(page: HeartbeatPage, tmp_path: Path) -> None:
    data = Data(page)
    distributon, model, optimizer, loader = set_up(data)
    assert (page.read().phase, page.read().watched, page.read().step) == ("loading", False, -1)
    assert distributon.load(root=tmp_path / "checkpoints", model=model) is None
    seen = []
    for batch in loader:
        seen.append((page.read().phase, page.read().step))
        distributon.backward(model(batch).sum())
        optimizer.step()
        seen.append((page.read().phase, page.read().step))
        assert page.read().watched
    assert data.seen == ["data"] * 8
    assert seen[:4] == [("first_step", -1), ("step", 1), ("step", 1), ("step", 2)]
    beat = page.read()
    assert (beat.step, beat.steps, beat.resumed) == (4, 4, 0)
    assert 0 < beat.wait_s < beat.step_s
    assert not beat.watched, "what comes after the loop is not known"
    distributon.close()
    assert (page.read().phase, page.read().watched) == ("ending", False)


def test_a_loop_that_ends_early_or_evaluates_is_shown(page: HeartbeatPage) -> None:
    data = Data(page)
    distributon, model, optimizer, loader = set_up(data)
    for batch in loader:
        if distributon.should_stop():
            break
        for _ in range(2):  # An accumulated step counts once.
            distributon.backward(model(batch).sum())
        optimizer.step()
        if page.read().step == 2:
            break
    assert not page.read().watched
    data.seen.clear()
    with torch.no_grad():
        for _ in loader:
            pass
    assert set(data.seen) == {"evaluating"}
    assert page.read().step == 2
    distributon.close()


def test_steps_are_counted_without_an_optimizer_that_was_set_up(page: HeartbeatPage) -> None:
    with Distributon(strategy="single", seed=0) as distributon:
        distributon.launch()
        model = distributon.setup_model(nn.Linear(2, 1))
        for step in range(3):
            distributon.should_stop()
            assert page.read().step == (step or -1)
            distributon.backward(model(torch.ones(1, 2)).sum())
        assert page.read().watched


def test_after_a_checkpoint_the_phase_before_is_shown_again(
    page: HeartbeatPage, shown: list[str], tmp_path: Path
) -> None:
    distributon, model, optimizer, loader = set_up(Data(page))
    for batch in loader:
        distributon.backward(model(batch).sum())
        optimizer.step()
        distributon.save(page.read().step, root=tmp_path, model=model)
        assert (page.read().phase, page.read().watched) == ("step", True)
    assert in_turn(shown)[-10:].count("saving") >= 2
    distributon.close()
    with Distributon(strategy="single", seed=0) as again:
        again.launch()
        other = again.setup_model(nn.Linear(2, 1))
        again.setup_dataloader(DataLoader(Data(page), batch_size=2))
        assert again.load(root=tmp_path, model=other) == 4
        assert (page.read().resumed, page.read().phase, page.read().watched) == (4, "loading", False)


def test_a_users_work_can_send_heartbeats(page: HeartbeatPage) -> None:
    with Distributon(strategy="single", seed=0) as distributon:
        distributon.launch()
        distributon.heartbeat("loading")
        first = page.read()
        distributon.heartbeat("loading")
        assert first.watched
        assert page.read().since > first.since
        with pytest.raises(ConfigError, match="Unknown phase 'thinking'"):
            distributon.heartbeat("thinking")


class Event:
    """One of a GPU's events: what it is asked of that is not done yet would make the rank wait."""

    now, done = 0.0, False

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        assert Event.done
        return 1000 * (end.at - self.at)


def test_forward_passes_on_a_gpu_are_measured_without_waiting_for_it(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmddp.training.heartbeat._event", Event)
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "done", False)
    progress = Heartbeat(HeartbeatPage.attach({HEARTBEAT_VARIABLE: str(page.descriptor)}), StartupTimer({}))
    for number, _ in enumerate(progress.batches(iter(range(7)), torch.device("cuda")), 1):
        Event.now += 0.25
        Event.done = number >= 4
        progress.backward_begins()
        progress.backward_begins()  # A second loss of the same batch is no further pass.
        progress.step_begins()
    # The first was done when the fourth ended, and stands for four; the fifth for itself and the sixth.
    assert page.read().forward_s == pytest.approx(6 * 0.25)


def test_each_question_for_a_stop_is_a_heartbeat_with_and_without_a_step(page: HeartbeatPage) -> None:
    progress = Heartbeat(HeartbeatPage.attach({HEARTBEAT_VARIABLE: str(page.descriptor)}), StartupTimer({}))
    progress.backward_begins()
    for _ in range(3):
        before = page.read().since
        progress.step_begins()
        assert page.read().since > before and page.read().phase == "step"
