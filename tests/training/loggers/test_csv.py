"""The CSV file after a kill, and with names that come later."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from slurmddp.training.loggers import LoggedRun
from slurmddp.training.loggers.csv import CsvLogger


def test_a_cut_off_row_is_left_out_and_a_new_name_gets_a_column(run: LoggedRun) -> None:
    run.folder.mkdir()
    file = run.folder / "metrics.csv"
    file.write_text('step,loss,"a,b"\n1,0.5,2.0\n2,0.25,3.0\n3,0.1')
    logger = CsvLogger()
    logger.start(replace(run, first_step=9))
    logger.log({"loss": float("nan"), "late": 4}, 9)
    logger.close(finished=True)
    assert file.read_text().splitlines() == ['step,loss,"a,b",late', "1,0.5,2.0,", "2,0.25,3.0,", "9,nan,,4"]
    assert [one.name for one in run.folder.iterdir()] == ["metrics.csv"]


def test_rows_after_a_full_disk_are_in_the_file(run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = CsvLogger()
    logger.start(replace(run, first_step=0))
    logger.log({"loss": 0.5}, 1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.fsync", full)
        logger.log({"loss": 0.25, "late": 4}, 2)
    logger.log({"loss": 0.2}, 3)
    logger.log({"loss": 0.1, "late": 5}, 4)
    logger.close(finished=True)
    file = run.folder / "metrics.csv"
    assert file.read_text().splitlines() == ["step,loss,late", "1,0.5,", "3,0.2,", "4,0.1,5"]
    assert [one.name for one in run.folder.iterdir()] == ["metrics.csv"]
