"""Send metrics to an MLflow tracking server."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.training.loggers.library import imported
from slurmddp.training.loggers.logger import LoggedRun, Logger

ID_FILE = "mlflow-run-id"
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Matches characters that MLflow refuses in names."""
_PARAMS = 100
"""The largest number of parameters in a request."""
_VALUE_CHARS = 500
"""The largest length of a parameter's value on older servers."""


class MlflowLogger(Logger):
    """Logger that sends metrics to MLflow; all starts of a run continue the same MLflow run.

    The id of the MLflow run is stored in the file `loggers/mlflow-run-id`.

    Args:
        experiment: the name of the experiment; by default MLFLOW_EXPERIMENT_NAME, or else "Default".
        tracking_uri: the server, such as "http://host:5000"; by default MLFLOW_TRACKING_URI, or else MLflow's
            default.
        tags: texts by name, set when the MLflow run is created.
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment = experiment
        self._uri = tracking_uri
        self._tags = dict(tags or {})

    def start(self, run: LoggedRun) -> None:
        self._mlflow = imported("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=self._server())

        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / ID_FILE
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        if not self._run_id and run.is_continued and path.exists():
            self._run_id = path.read_text(encoding="utf-8").strip()

        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create_run(run)
            path.write_text(f"{self._run_id}\n", encoding="utf-8")
            self._log_config(run.config)

    def _create_run(self, run: LoggedRun) -> str:
        """Create an MLflow run and return its id."""
        created = self._client.create_run(self._experiment_id(), run_name=run.name, tags=self._tags)
        return str(created.info.run_id)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        params = [
            self._mlflow.entities.Param(_REFUSED.sub("_", name), str(value)[:_VALUE_CHARS])
            for name, value in _leaves(config)
        ]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS])

    def _server(self) -> str | None:
        """Return the argument `tracking_uri`; None for MLflow's default.

        Raises:
            ConfigError: the server is an SQLite file, and the package for such files is not installed.
        """
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or self._mlflow.get_tracking_uri()
        if uri.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(
                f"mlflow-skinny can't write to {uri}, because sqlalchemy is missing.",
                hint="Name a server by `tracking_uri` or MLFLOW_TRACKING_URI, or install mlflow.",
            )

        return self._uri

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._mlflow.entities.Metric(_REFUSED.sub("_", name), float(value), now_ms, step)
                for name, value in metrics.items()
            ],
        )

    def close(self, finished: bool) -> None:
        if finished:
            self._client.set_terminated(self._run_id)
        else:
            # Set SCHEDULED and not an end status, because the next start continues this MLflow run.
            self._client.update_run(self._run_id, status="SCHEDULED")

    def _experiment_id(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        return str(experiment.experiment_id)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name (such as `train.steps`) and the value of each key of a nested configuration."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
