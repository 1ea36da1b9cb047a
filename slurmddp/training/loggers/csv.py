"""Write metrics into one CSV file, with a row per call and a column per name."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from slurmddp.training.loggers.logger import LoggedRun, Logger

FILE = "metrics.csv"


class CsvLogger(Logger):
    """Logger that writes `metrics.csv`: the column `step`, then a column per metric, in order of appearance.

    The file is rewritten when a metric appears for the first time. Each start rewrites it without the rows of
    steps that the training repeats.
    """

    def start(self, run: LoggedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._path = run.folder / FILE
        columns = ["step"]
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as stream:
                columns = next(csv.reader(stream), columns)

        self._rewrite(columns, run.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new_names = [name for name in metrics if name not in self._columns]
        if new_names:
            old_stream = self._stream
            old_stream.flush()
            self._rewrite([*self._columns, *new_names])
            old_stream.close()

        self._rows.writerow({"step": step, **metrics})

    def flush(self) -> None:
        self._stream.flush()

    def close(self, finished: bool) -> None:
        self._stream.close()

    def _rewrite(self, columns: list[str], first_step: float = float("inf")) -> None:
        """Rewrite the file with `columns` and its rows before `first_step`, and append later rows to it.

        After an error, such as a full disk, the old file and its columns stay in use.
        """
        temporary = self._path.with_name(f"{FILE}.tmp")
        stream: TextIO = temporary.open("w", newline="", encoding="utf-8")
        rows = csv.DictWriter(stream, columns)

        try:
            rows.writeheader()
            rows.writerows(_rows_before(self._path, first_step))
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(self._path)
        except BaseException:
            with suppress(OSError):
                stream.close()

            temporary.unlink(missing_ok=True)
            raise

        self._stream = stream
        self._rows = rows
        self._columns = columns


def _rows_before(path: Path, first_step: float) -> Iterator[dict[str, str]]:
    """Yield the rows of steps before `first_step`, without a row that was cut off."""
    if not path.exists():
        return

    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            step = row.get("step") or ""
            # A killed process may have left a cut-off last row, in which DictReader sets missing keys and
            # values to None.
            is_whole = None not in (*row, *row.values())
            if step.isdecimal() and int(step) < first_step and is_whole:
                yield row
