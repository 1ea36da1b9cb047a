"""A training that was interrupted ends with the very numbers of an undisturbed one, case by case.

Each row of `CASES` is a training of 12 steps in epochs of 5, evaluated after every fourth, that is
interrupted at the named places and started again, in new processes, until it is done. The undisturbed one has
no loader workers and saves at its end only. Equal have to be, bit by bit: weights, optimizer, schedulers,
random states of all ranks, position in the data, and the series of losses as it is written and as it is read.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exact_jobs
import pytest
from exact_jobs import Halt
from ranks import run_ranks
from test_trainer import assert_same, final_state
from trainer_runs import trainer_config

from slurmddp.runs.folder import RunFolder, read_lines
from slurmddp.runs.metrics import read

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

STEPS, EPOCH, EVAL_EVERY, BATCH, HELDOUT = 12, 5, 4, 2, 10
TRAINER, OWN_LOOP = "slurmddp.training.trainer.train", "exact_jobs.own_loop"

SCHEDULERS: dict[str, dict[str, Any]] = {
    "cosine": {"_target_": "slurmddp.training.schedules.cosine", "steps": STEPS, "warmup_steps": 2},
    "constant": {"_target_": "slurmddp.training.schedules.constant", "warmup_steps": 7},
    "one-cycle": {
        "_target_": "torch.optim.lr_scheduler.OneCycleLR",
        "max_lr": 0.02,
        "total_steps": STEPS + 1,
    },
    "restarts": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "T_0": 4},
    "exponential": {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9},
}


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    interrupted: str
    """Where, in turn; the steps are drawn, see `PLACES`."""
    workers: int = 0
    accumulate: int = 1
    scheduler: str = "cosine"
    program: str = TRAINER
    log_every: int = 1
    strategy: tuple[tuple[str, Any], ...] = (("name", "ddp"),)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def places(self) -> list[str]:
        return self.interrupted.split()

    @property
    def halts(self) -> list[Halt]:
        """The same in every run of this test."""
        source = random.Random(self.name)
        while True:
            halts = [PLACES[place](source, self) for place in self.places]
            # A signal lets the ranks take one or two steps more.
            earliest = [halt.step + (3 if halt.how == "signal" else 1) for halt in halts]
            if all(halt.step >= least for halt, least in zip(halts[1:], earliest, strict=False)):
                return halts


PLACES: dict[str, Callable[[random.Random, Case], Halt]] = {
    **{str(step): lambda source, case, step=step: Halt("told", step) for step in range(1, STEPS)},
    "start": lambda source, case: Halt("told", 0),
    "first": lambda source, case: Halt("told", 1),
    "middle": lambda source, case: Halt("told", source.choice([2, 3, 4, 7, 8, 9])),
    "epoch-end": lambda source, case: Halt("told", source.choice([EPOCH, 2 * EPOCH])),
    "next-epoch": lambda source, case: Halt("told", source.choice([EPOCH + 1, 2 * EPOCH + 1])),
    "evaluation": lambda source, case: Halt(
        "evaluation",
        source.choice([0, EVAL_EVERY, 2 * EVAL_EVERY, STEPS]),
        source.randrange(-(-(HELDOUT // case.ranks) // BATCH)),
    ),
    "accumulation": lambda source, case: Halt(
        "signal", source.randrange(1, STEPS - 3), source.randrange(1, case.accumulate)
    ),
    "killed": lambda source, case: Halt(
        "killed", source.randrange(1, STEPS), source.randrange(case.accumulate)
    ),
}

CASES = [
    # One interruption.
    Case("after the first step", 2, "first", workers=2, scheduler="one-cycle"),
    Case("in the middle of an epoch", 4, "middle", scheduler="constant"),
    Case("at the end of an epoch", 1, "epoch-end", workers=2, accumulate=2, scheduler="restarts"),
    Case("after the first step of an epoch", 2, "next-epoch", workers=2, accumulate=2),
    Case("in an evaluation", 2, "evaluation", scheduler="exponential"),
    Case("in an accumulation", 4, "accumulation", workers=2, accumulate=2),
    Case("killed", 4, "killed", scheduler="constant", log_every=3),
    # Two.
    Case("two on one rank", 1, "killed next-epoch", workers=2, scheduler="restarts"),
    Case("two on two ranks", 2, "first accumulation", accumulate=3, scheduler="constant"),
    Case(
        "two on two ranks with workers", 2, "middle epoch-end", workers=2, scheduler="one-cycle", log_every=5
    ),
    Case("two on four ranks", 4, "evaluation next-epoch", workers=2, accumulate=2),
    # Five.
    Case("five on one rank", 1, "first middle evaluation accumulation epoch-end", accumulate=2, log_every=3),
    Case("five on two ranks", 2, "start killed epoch-end next-epoch evaluation"),
    Case("five on four ranks", 4, "first middle killed accumulation epoch-end", workers=2, accumulate=2),
    # Other ways to build the same.
    Case("after every step", 1, "1 2 3 4 5 6 7 8 9 10 11", log_every=5),
    Case("small buckets", 4, "middle", strategy=(("name", "ddp"), ("bucket_mb", 0.02))),
    Case("unused parameters", 4, "middle", strategy=(("name", "ddp"), ("find_unused_parameters", True))),
    Case("an own loop on one rank", 1, "middle killed", program=OWN_LOOP),
    Case("an own loop on two ranks", 2, "first middle killed epoch-end next-epoch", program=OWN_LOOP),
    Case("an own loop on four ranks", 4, "epoch-end middle", workers=2, program=OWN_LOOP),
]


def config_of(case: Case, **train: Any) -> dict[str, Any]:
    settings = {
        "steps": STEPS,
        "batch_size": BATCH,
        "accumulate": case.accumulate,
        "log_every": case.log_every,
        "eval_every": EVAL_EVERY,
        "eval_batches": HELDOUT,
        "save_every": 0,
        "workers": 0,
    }
    # The one sample that is left over belongs to no step.
    size = EPOCH * BATCH * case.accumulate * case.ranks + 1
    return trainer_config(
        data={"_target_": "exact_jobs.Blurred", "size": size, "heldout": HELDOUT},
        train={**settings, **train},
        model={"_target_": "exact_jobs.Noisy"},
        scheduler=SCHEDULERS[case.scheduler],
        strategy=dict(case.strategy),
        program={"_target_": case.program},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], RunFolder]:
    """Return the run that a case is compared with; cases that compute the same share it."""
    known: dict[str, RunFolder] = {}

    def run(case: Case) -> RunFolder:
        config = config_of(case)
        key = f"{case.ranks} {json.dumps(config)}"
        if key not in known:
            folder = RunFolder(tmp_path_factory.mktemp("undisturbed"))
            ends = run_ranks(exact_jobs.attempt, case.ranks, config, str(folder.path), 0, None)
            assert ends == ["finished"] * case.ranks
            assert shown(folder)[0] == (*range(case.log_every, STEPS, case.log_every), STEPS)
            known[key] = folder
        return known[key]

    return run


def shown(folder: RunFolder) -> tuple[Any, ...]:
    """Return the series of losses as the report and a reader see them."""
    metrics = read(folder)
    return metrics.train.steps, metrics.train.values, metrics.held_out.steps, metrics.held_out.values


def written(folder: RunFolder) -> list[tuple[Any, ...]]:
    """Return all that was written down about steps, line by line, but for times and rates."""
    return [
        tuple(line.get(key) for key in ("step", "loss", "eval_loss", "lr"))
        for line in read_lines(folder.metrics_file)
    ]


def assert_ended(ends: list[str], halt: Halt | None) -> None:
    """All ranks have ended in the way that was brought about, after the same step."""
    assert len(set(ends)) == 1, ends
    if halt is None or halt.how == "killed":
        assert ends[0] == ("killed" if halt else "finished")
        return
    # Where a signal comes inside a step, the ranks take it back, or finish it, or one more.
    steps = [halt.step, halt.step + 1, halt.step + 2] if halt.how == "signal" else [halt.step]
    assert ends[0].startswith(tuple(f"Stopped at step {step} " for step in steps)), ends[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupted_training_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[[Case], RunFolder], case: Case
) -> None:
    whole, parts = undisturbed(case), RunFolder(tmp_path)
    config = config_of(case, workers=case.workers, save_every=3)
    for number, halt in enumerate([*case.halts, None]):
        ends = run_ranks(exact_jobs.attempt, case.ranks, config, str(parts.path), number, halt)
        assert_ended(ends, halt)
    assert_same(final_state(whole), final_state(parts))
    assert shown(parts) == shown(whole)
    if "killed" not in case.places:  # Else steps were repeated, and the reader has to know which lines count.
        assert written(parts) == written(whole)


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
    page = (Path(__file__).parents[2] / "docs" / "exact-resume.md").read_text()
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
