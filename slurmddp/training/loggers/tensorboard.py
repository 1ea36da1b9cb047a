"""Write metrics for TensorBoard: `tensorboard --logdir RUN/loggers/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from slurmddp.training.loggers.library import imported
from slurmddp.training.loggers.logger import LoggedRun, Logger

FOLDER = "tensorboard"


class TensorBoardLogger(Logger):
    """Write scalars, and the configuration as text, into one folder for all starts.

    Each start writes a file with `purge_step`, so that TensorBoard shows repeated steps once.
    """

    def start(self, run: LoggedRun) -> None:
        tensorboard = imported("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(run.folder / FOLDER), purge_step=run.first_step)
        if run.config:
            text = json.dumps(run.config, indent=2, default=str, ensure_ascii=False)
            # TensorBoard shows texts as Markdown, and indented lines as code.
            indented = "".join(f"    {line}\n" for line in text.splitlines())
            self._writer.add_text("config", indented, run.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
