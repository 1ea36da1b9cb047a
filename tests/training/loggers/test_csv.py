"""The CSV file after a kill, and with names that come later."""

from __future__ import annotations

from dataclasses import replace

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
