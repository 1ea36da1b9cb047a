"""What the ranks of `test_cut_evaluation` run."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from rank_jobs import StopsInEvaluation

from slurmddp.errors import StoppedAtCheckpoint
from slurmddp.runs.folder import RunFolder
from slurmddp.training import trainer


class AgreesLate(StopsInEvaluation):
    """Learns in an evaluation that it should stop, while the ranks' agreement is still a step away."""

    late = 1

    def should_stop(self) -> bool:
        if not super().should_stop():
            return False
        self.late -= 1
        return self.late < 0


def train_with_late_agreement(config: dict[str, Any], folder: str, batch: int | None) -> str:
    """Run the default program, with a stop in the evaluated batch `batch` if given; return how it ended."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            with AgreesLate(1_000_000 if batch is None else batch, seed=config["seed"]) as d:
                d.launch()
                trainer.train(d, config, RunFolder(folder))
        except StoppedAtCheckpoint as stopped:
            return str(stopped)
    return "finished"
