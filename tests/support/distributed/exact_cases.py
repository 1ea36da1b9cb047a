"""Interrupted trainings, and their comparison with undisturbed trainings.

`tests/end_to_end/test_exact_resume.py` runs the cases on CPUs, `tests/gpu/` on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.metrics import read
from support.distributed import exact_jobs
from support.distributed.exact_jobs import Halt
from support.distributed.ranks import place_environments, run_ranks
from support.distributed.trainer_runs import final_state, trainer_config

STEPS = 12
EPOCH = 5
EVAL_EVERY = 4
BATCH = 2
HELDOUT = 10
TRAINER = "slurmddp.training.trainer.train"
OWN_LOOP = "support.distributed.exact_jobs.own_loop"

SCHEDULERS: dict[str, dict[str, Any]] = {
    "cosine": {"_target_": "slurmddp.training.builtin.schedules.cosine", "steps": STEPS, "warmup_steps": 2},
    "constant": {"_target_": "slurmddp.training.builtin.schedules.constant", "warmup_steps": 7},
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
    """Names of the places of the interruptions, in their order (see `PLACES`); their steps are random."""
    workers: int = 0
    accumulate: int = 1
    scheduler: str = "cosine"
    program: str = TRAINER
    log_every: int = 1
    strategy: tuple[tuple[str, Any], ...] = (("name", "ddp"),)
    train: tuple[tuple[str, Any], ...] = ()
    bad_sample: int | None = None
    """The index of a sample that holds NaN. Sample 17 is first read in the fifth step."""
    skipped: tuple[int, ...] = ()
    """The steps without a loss, because their update is left out."""
    precision: str = "32"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def places(self) -> list[str]:
        return self.interrupted.split()

    @property
    def halts(self) -> list[Halt]:
        """The interruptions of this case, the same in every run of this test."""
        source = random.Random(self.name)
        while True:
            halts = [PLACES[place](source, self) for place in self.places]
            # After a signal, the ranks take one or two more steps.
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
    # Cases with one interruption.
    Case("after the first step", 2, "first", workers=2, scheduler="one-cycle"),
    Case("in the middle of an epoch", 4, "middle", scheduler="constant"),
    Case("at the end of an epoch", 1, "epoch-end", workers=2, accumulate=2, scheduler="restarts"),
    Case("after the first step of an epoch", 2, "next-epoch", workers=2, accumulate=2),
    Case("in an evaluation", 2, "evaluation", scheduler="exponential"),
    Case("in an accumulation", 4, "accumulation", workers=2, accumulate=2),
    Case("killed", 4, "killed", scheduler="constant", log_every=3),
    # Cases with two interruptions.
    Case("two on one rank", 1, "killed next-epoch", workers=2, scheduler="restarts"),
    Case("two on two ranks", 2, "first accumulation", accumulate=3, scheduler="constant"),
    Case(
        "two on two ranks with workers", 2, "middle epoch-end", workers=2, scheduler="one-cycle", log_every=5
    ),
    Case("two on four ranks", 4, "evaluation next-epoch", workers=2, accumulate=2),
    # Cases with five interruptions.
    Case("five on one rank", 1, "first middle evaluation accumulation epoch-end", accumulate=2, log_every=3),
    Case("five on two ranks", 2, "start killed epoch-end next-epoch evaluation"),
    Case("five on four ranks", 4, "first middle killed accumulation epoch-end", workers=2, accumulate=2),
    # Cases of other models, data and strategies.
    Case("after every step", 1, "1 2 3 4 5 6 7 8 9 10 11", log_every=5),
    Case("small buckets", 4, "middle", strategy=(("name", "ddp"), ("bucket_mb", 0.02))),
    Case("unused parameters", 4, "middle", strategy=(("name", "ddp"), ("find_unused_parameters", True))),
    # Cases in which the trainer itself has a state.
    Case(
        "averaged weights and skipped steps",
        2,
        "middle 5 next-epoch",
        bad_sample=17,
        train=(("ema", 0.9), ("on_spike", "skip")),
        skipped=(5, 10, 12),
    ),
    Case(
        "averaged weights of replicas",
        2,
        "middle",
        strategy=(("name", "local_sgd"), ("every", 3)),
        train=(("ema", 0.9),),
    ),
    Case(
        "rollbacks",
        2,
        "4 killed 7",
        bad_sample=17,
        accumulate=2,
        train=(("on_spike", "rollback"), ("save_every", 3)),
    ),
    Case("an own loop on one rank", 1, "middle killed", program=OWN_LOOP),
    Case("an own loop on two ranks", 2, "first middle killed epoch-end next-epoch", program=OWN_LOOP),
    Case("an own loop on four ranks", 4, "epoch-end middle", workers=2, program=OWN_LOOP),
    # Stopped right after a step that the loss scaler leaves out.
    Case("an own loop in fp16", 2, "6 killed", program=OWN_LOOP, precision="fp16"),
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
    config = trainer_config(
        data={
            "_target_": "support.distributed.exact_jobs.Blurred",
            "size": size,
            "heldout": HELDOUT,
            "bad": case.bad_sample,
        },
        train={**settings, **train, **dict(case.train)},
        model={"_target_": "support.distributed.exact_jobs.Noisy"},
        callbacks={"drift": {"_target_": "support.distributed.exact_jobs.Drift"}},
        scheduler=SCHEDULERS[case.scheduler],
        strategy=dict(case.strategy),
        program={"_target_": case.program},
    )
    return config | {"precision": case.precision}


def train(
    folder: Path,
    case: Case,
    config: dict[str, Any],
    halts: Sequence[Halt],
    around: Callable[..., Any] | None = None,
    **environ: str,
) -> RunFolder:
    """Train in as many attempts as there are halts, and one more.

    Args:
        around: a rank program that calls the attempt; None: the attempt is the rank program.
    """
    folder.mkdir(exist_ok=True)
    program, *inner = [around, exact_jobs.attempt] if around is not None else [exact_jobs.attempt]
    for number, halt in enumerate([*halts, None]):
        places = [place | environ for place in place_environments(case.ranks)]
        args = (*inner, config, str(folder), number, halt)
        assert_ended(run_ranks(program, case.ranks, *args, environments=places), halt)

    return RunFolder(folder)


def results(folder: RunFolder, case: Case) -> dict[str, Any]:
    """Return all that an interrupted training has in common with the undisturbed one."""
    # A killed attempt repeats steps, and the reader has to know which lines count.
    lines = [] if "killed" in case.places else written(folder)
    return {"state": final_state(folder), "shown": shown(folder), "written": lines}


def shown(folder: RunFolder) -> tuple[Any, ...]:
    """Return the training losses and the held-out losses by step, as the report shows them."""
    metrics = read(folder)
    return metrics.train.steps, metrics.train.values, metrics.held_out.steps, metrics.held_out.values


def written(folder: RunFolder) -> list[tuple[Any, ...]]:
    """Return all values of `metrics.jsonl`, line by line, except times and rates."""
    return [
        tuple(line.get(key) for key in ("step", "loss", "eval_loss", "lr", "grad_norm"))
        for line in read_lines(folder.metrics_file)
    ]


def assert_ended(ends: list[str], halt: Halt | None) -> None:
    """Check that all ranks have ended in the way of `halt`, after the same step."""
    assert len(set(ends)) == 1, ends
    if halt is None or halt.how == "killed":
        assert ends[0] == ("killed" if halt else "finished")
        return

    # After a signal inside a step, the ranks discard the step, or finish it, or take one more step.
    steps = [halt.step, halt.step + 1, halt.step + 2] if halt.how == "signal" else [halt.step]
    assert ends[0].startswith(tuple(f"Stopped at step {step} " for step in steps)), ends[0]
