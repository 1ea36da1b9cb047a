"""Send metrics to Weights & Biases, or keep them on disk for `wandb sync`."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from slurmddp.training.loggers.library import imported
from slurmddp.training.loggers.logger import CLOSE_S, LoggedRun, Logger

log = logging.getLogger(__name__)


class WandbLogger(Logger):
    """Logger that sends metrics to Weights & Biases; all starts of a run continue the same wandb run.

    For this, a job of slurmddp sets WANDB_RUN_ID and WANDB_RESUME=allow for its ranks. All other environment
    variables of wandb apply too. Without an API key or a network connection, the wandb run is written
    offline, unless `mode` or WANDB_MODE is set.

    Args:
        project, entity, group, tags, notes, mode: as for `wandb.init`; None: wandb decides.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        mode: str | None = None,
    ) -> None:
        self._options = {
            "project": project, "entity": entity, "group": group, "tags": tags, "notes": notes, "mode": mode,
        }  # fmt: skip

    def start(self, run: LoggedRun) -> None:
        wandb = imported("wandb")
        run.folder.mkdir(parents=True, exist_ok=True)

        settings = {"console": "off", "quiet": True, "finish_timeout": CLOSE_S / 2}
        # Pass only settings that this version of wandb has: older versions lack `finish_timeout`.
        known = getattr(wandb.Settings, "model_fields", {})
        options: dict[str, Any] = {
            **self._options,
            "dir": str(run.folder),
            "config": dict(run.config),
            "settings": wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        }
        if "WANDB_NAME" not in os.environ:
            options["name"] = run.name

        try:
            self._run = wandb.init(**options)
        except wandb.errors.Error as error:
            if self._options["mode"] or "WANDB_MODE" in os.environ:
                raise

            log.warning("wandb can't be reached: %s", error)
            self._run = wandb.init(**{**options, "mode": "offline"})

        if getattr(self._run, "offline", False):
            folder = shlex.quote(str(run.folder / "wandb"))
            log.warning("wandb is offline. To upload the metrics later: wandb sync %s/offline-run-*", folder)

        # wandb's own step counter only grows, but steps repeat after a restart. So log `step` as a value, and
        # use it as the x axis of all metrics.
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, finished: bool) -> None:
        if not finished:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if finished else 1)
