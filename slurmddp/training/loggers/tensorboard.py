"""Write metrics for TensorBoard: `tensorboard --logdir RUN/loggers/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from slurmddp.training.loggers.library import imported
from slurmddp.training.loggers.logger import LoggedRun, Logger

FOLDER = "tensorboard"


class TensorBoardLogger(Logger):
    """Logger that writes metrics, and the configuration as text, as TensorBoard events.

    All starts of a run write into one folder, each into its own file. The file sets `purge_step`, so that
    TensorBoard hides older values of steps that the training repeats.
    """

    def start(self, run: LoggedRun) -> None:
        tensorboard = imported("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(run.folder / FOLDER), purge_step=run.first_step)
        if run.config:
            text = json.dumps(run.config, indent=2, default=str, ensure_ascii=False)
            # TensorBoard renders texts as Markdown, in which indented lines are a code block.
            indented = "".join(f"    {line}\n" for line in text.splitlines())
            self._writer.add_text("config", indented, run.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
