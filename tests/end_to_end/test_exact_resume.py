"""A training that was interrupted ends with the very numbers of an undisturbed one, case by case.

Each row of `CASES` is a training of 12 steps in epochs of 5, evaluated after every fourth, that is
interrupted at the named places and started again, in new processes, until it is done. The undisturbed one has
no loader workers and saves at its end only. Equal have to be, bit by bit: weights, optimizer, schedulers,
random states of all ranks, position in the data, and the series of losses as it is written and as it is read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.folder.layout import RunFolder
from support import ROOT
from support.distributed import exact_jobs
from support.distributed.exact_cases import (
    CASES,
    EPOCH,
    SCHEDULERS,
    STEPS,
    TRAINER,
    Case,
    assert_ended,
    config_of,
    results,
    shown,
    train,
)
from support.distributed.exact_jobs import Halt
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import assert_same, final_state

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], RunFolder]:
    """Return the run that a case is compared with; cases that compute the same share it."""
    known: dict[str, RunFolder] = {}

    def run(case: Case) -> RunFolder:
        config = config_of(case)
        key = f"{case.ranks} {json.dumps(config)}"
        if key not in known:
            folder = train(tmp_path_factory.mktemp("undisturbed"), case, config, [])
            lines = (*range(case.log_every, STEPS, case.log_every), STEPS)
            assert shown(folder)[0] == tuple(step for step in lines if step not in case.skipped)
            known[key] = folder
        return known[key]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_t7_an_interrupted_training_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[[Case], RunFolder], case: Case
) -> None:
    parts = train(tmp_path, case, config_of(case, workers=case.workers, save_every=3), case.halts)
    assert_same(results(parts, case), results(undisturbed(case), case))


def test_every_two_conditions_meet_in_a_case() -> None:
    """Ranks, workers, accumulation, number of interruptions and their places, in pairs."""
    ours = [case for case in CASES if case.program == TRAINER and len(case.places) in (1, 2, 5)]
    met = {pair for case in ours for pair in itertools.combinations(conditions(case), 2)}
    known = sorted({condition for case in ours for condition in conditions(case)})
    wanted = {pair for pair in itertools.combinations(known, 2) if pair[0][0] != pair[1][0]}
    wanted.discard((("accumulate", False), ("place", "accumulation")))
    assert {one for one, _ in wanted} | {other for _, other in wanted} == set(known)
    assert not wanted - met
    assert {case.scheduler for case in ours} == set(SCHEDULERS)


def test_the_documentation_names_every_case() -> None:
    page = (ROOT / "docs" / "guides" / "exact-resume.md").read_text()
    assert [str(case) for case in [*CASES, *ELASTIC] if f"`{case}`" not in page] == []


def conditions(case: Case) -> list[tuple[str, Any]]:
    found = [("ranks", case.ranks), ("workers", case.workers), ("accumulate", case.accumulate > 1)]
    places = [("place", place) for place in case.places if place != "start"]
    return sorted([*found, ("interruptions", len(case.places)), *places])


# With more or fewer ranks.

TOLERANCE = 1e-5
"""What the documentation states for the weights: only the order of summation differs."""


@dataclass(frozen=True)
class Elastic:
    name: str
    plan: tuple[tuple[int, int], ...]
    """Ranks, and the step after which they are stopped; the last ones go on to the end."""
    workers: int = 0

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


ELASTIC = [
    Elastic("half of the ranks", ((4, 3), (2, STEPS))),
    Elastic("twice the ranks", ((2, 5), (4, STEPS)), workers=2),
    Elastic("four two three one", ((4, 2), (2, 5), (3, 6), (1, STEPS))),
]


@pytest.mark.parametrize("case", ELASTIC, ids=str)
def test_with_other_ranks_each_step_keeps_its_samples_and_nearly_its_numbers(
    tmp_path: Path, case: Elastic
) -> None:
    first = case.plan[0][0]
    whole, samples = train_elastic(tmp_path / "whole", [(first, STEPS)], workers=0)
    parts, samples_of_parts = train_elastic(tmp_path / "parts", case.plan, workers=case.workers)
    assert len(samples) == STEPS and samples_of_parts == samples
    for before, after in zip(shown(whole), shown(parts), strict=True):
        assert after == pytest.approx(before, abs=TOLERANCE, rel=0)
    weights, weights_of_parts = (final_state(folder)["objects"]["model"] for folder in (whole, parts))
    for name, value in weights.items():
        assert float((value - weights_of_parts[name]).abs().max()) <= TOLERANCE, name


def train_elastic(
    path: Path, plan: Sequence[tuple[int, int]], workers: int
) -> tuple[RunFolder, list[list[int]]]:
    """Train in steps of 12 samples as `plan` says; return the run and the samples of each step."""
    path.mkdir()
    config = config_of(Case("", 1, ""), workers=workers, batch_size=12 // plan[0][0])
    config["data"]["size"] = 12 * EPOCH + 1
    steps = []
    for number, (ranks, until) in enumerate(plan):
        notes = path / f"notes-{number}"
        notes.mkdir()
        config["model"] |= {"dropout": 0, "norm": False, "notes": str(notes)}
        halt = Halt("told", until) if until < STEPS else None
        assert_ended(run_ranks(exact_jobs.attempt, ranks, config, str(path), number, halt), halt)
        steps += samples_of_steps(notes, ranks)
    return RunFolder(path), steps


def samples_of_steps(notes: Path, ranks: int) -> list[list[int]]:
    read = [list(map(int, (notes / f"rank-{rank}").read_text().split())) for rank in range(ranks)]
    own = 12 // ranks
    starts = range(0, len(read[0]), own)
    return [sorted(index for part in read for index in part[start : start + own]) for start in starts]
