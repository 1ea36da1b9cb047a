"""The result of an experiment as a table for people and as JSON for programs; pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from chaos.faults import FAULTS
from chaos.recovery import CAME_BACK, IN_PLACE, WENT_ON, Outcome
from chaos.runner import Result
from slurmddp.runs.text_format import print_table

HEADERS = (
    "FAULT", "SURVIVED", "WENT ON", "IN PLACE", "CAME BACK", "LOST STEPS", "MOST", "RECOVERY", "LONGEST",
)  # fmt: skip


def as_json(result: Result) -> dict[str, Any]:
    """Return everything as plain values; with `complete` false it is what there was so far."""
    shape = result.settings.shape
    return {
        "complete": result.complete,
        "survived": sum(outcome.survived for outcome in result.outcomes),
        "faults_done": len(result.outcomes),
        "equal": all(run.good for run in result.runs),
        "seconds": result.seconds,
        "settings": {
            "faults": result.settings.faults,
            "kinds": list(result.settings.kinds),
            "seed": result.settings.seed,
            "shared": result.settings.shared,
            **asdict(shape),
        },
        "versions": result.versions,
        "by_kind": {kind: _totals(of_kind) for kind, of_kind in _by_kind(result).items()},
        "runs": [{**asdict(run), "good": run.good} for run in result.runs],
        "faults": [{**asdict(outcome), "survived": outcome.survived} for outcome in result.outcomes],
    }


def _by_kind(result: Result) -> dict[str, list[Outcome]]:
    kinds = {kind: [one for one in result.outcomes if one.kind == kind] for kind in FAULTS}
    return {kind: found for kind, found in kinds.items() if found}


def _totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    lost = [one.lost_steps for one in outcomes if one.lost_steps is not None]
    waits = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    return {
        "faults": len(outcomes),
        "survived": sum(one.survived for one in outcomes),
        "outcomes": Counter(one.outcome for one in outcomes),
        "lost_steps_median": statistics.median(lost) if lost else None,
        "lost_steps_most": max(lost, default=None),
        "recovery_s_median": round(statistics.median(waits), 2) if waits else None,
        "recovery_s_longest": max(waits, default=None),
    }


def print_result(result: Result, stream: TextIO) -> None:
    """Print one line per kind of fault and the verdict."""
    rows = [_row(kind, _totals(found)) for kind, found in _by_kind(result).items()]
    print_table(HEADERS, rows, stream, right=frozenset(HEADERS[2:]))
    print(f"\n{verdict(result)}", file=stream)


def _row(kind: str, totals: dict[str, Any]) -> tuple[str, ...]:
    def say(name: str, unit: str = "") -> str:
        value = totals[name]
        return "-" if value is None else f"{value:g}{unit}"

    return (
        kind,
        f"{totals['survived']} of {totals['faults']}",
        *(str(totals["outcomes"][how]) for how in (WENT_ON, IN_PLACE, CAME_BACK)),
        say("lost_steps_median"),
        say("lost_steps_most"),
        say("recovery_s_median", " s"),
        say("recovery_s_longest", " s"),
    )


def verdict(result: Result) -> str:
    """Return the result in a sentence."""
    survived = sum(outcome.survived for outcome in result.outcomes)
    good = sum(run.good for run in result.runs)
    sentence = (
        f"{survived} of {result.settings.faults} faults survived; {good} of {len(result.runs)} disturbed "
        "trainings ended with the weights and losses of the undisturbed one."
    )
    missing = result.settings.faults - len(result.outcomes)
    return sentence if not missing else f"{sentence} {missing} faults were not done."
