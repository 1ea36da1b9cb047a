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
"""Characters that MLflow takes in no name."""
_PARAMS = 100
"""Parameters of one request; MLflow takes no more."""
_VALUE_CHARS = 500
"""Length of a parameter; older servers take no longer one."""


class MlflowLogger(Logger):
    """Logs into one run of MLflow for all starts; its id is kept in `loggers/mlflow-run-id`.

    Args:
        experiment: its name; None: as MLFLOW_EXPERIMENT_NAME says, else "Default".
        tracking_uri: the server, such as "http://host:5000"; None: as MLFLOW_TRACKING_URI or MLflow says.
        tags: texts by name, for a new run.
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})

    def start(self, run: LoggedRun) -> None:
        self._mlflow = imported("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=self._server())
        run.folder.mkdir(parents=True, exist_ok=True)
        file = run.folder / ID_FILE
        known = file.read_text(encoding="utf-8").strip() if run.is_continued and file.exists() else ""
        self._run_id = os.environ.get("MLFLOW_RUN_ID") or known
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        made = self._client.create_run(self._experiment_id(), run_name=run.name, tags=self._tags)
        self._run_id = made.info.run_id
        file.write_text(f"{self._run_id}\n", encoding="utf-8")
        params = [
            self._mlflow.entities.Param(_REFUSED.sub("_", name), str(value)[:_VALUE_CHARS])
            for name, value in _leaves(run.config)
        ]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _PARAMS])

    def _server(self) -> str | None:
        """Return the named server, or None for MLflow's default; raises ConfigError if it can't be used."""
        named = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or self._mlflow.get_tracking_uri()
        if named.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(
                f"mlflow-skinny can't write to {named}, because sqlalchemy is missing.",
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
            self._client.update_run(self._run_id, status="SCHEDULED")

    def _experiment_id(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a configuration with their full names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
