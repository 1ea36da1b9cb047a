"""Write metrics into one CSV file, with a row per call and a column per name."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from slurmddp.training.loggers.logger import LoggedRun, Logger

FILE = "metrics.csv"


class CsvLogger(Logger):
    """Writes `metrics.csv`: the column `step`, then the names in the order of their first values.

    The file is rewritten when a name appears for the first time, and at a start without the repeated steps.
    """

    def start(self, run: LoggedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._path = run.folder / FILE
        self._columns: list[str] = ["step"]
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as stream:
                self._columns = next(csv.reader(stream), self._columns)
        self._rewrite(run.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if new := [name for name in metrics if name not in self._columns]:
            self.close(finished=False)
            self._columns = [*self._columns, *new]
            self._rewrite()
        self._rows.writerow({"step": step, **metrics})

    def flush(self) -> None:
        self._stream.flush()

    def close(self, finished: bool) -> None:
        self._stream.close()

    def _rewrite(self, first_step: float = float("inf")) -> None:
        """Write the header and the rows before `first_step` again, and stay open for further rows."""
        temporary = self._path.with_name(f"{FILE}.tmp")
        self._stream: TextIO = temporary.open("w", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._stream, self._columns)
        self._rows.writeheader()
        self._rows.writerows(_rows_before(self._path, first_step))
        self._stream.flush()
        temporary.replace(self._path)


def _rows_before(path: Path, first_step: float) -> Iterator[dict[str, str]]:
    """Yield the whole rows of earlier steps; a kill may have cut off the last row."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                step = row.get("step") or ""
                if step.isdecimal() and int(step) < first_step and None not in (*row, *row.values()):
                    yield row
