"""`slurmddp report` writes the report of a run."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FAILED

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_report_is_written_again(make_run, slurm, capsys):
    folder = make_run()
    assert main(["report", "gpt"]) == 0
    assert capsys.readouterr().out == f"{folder.report_file}\n"
    assert folder.report_file.exists()


def test_a_report_that_cannot_be_written_is_an_error(make_run, slurm, capsys):
    folder = make_run()
    folder.report_file.mkdir()
    assert main(["report", "gpt"]) == EXIT_FAILED
    assert "can't be written" in capsys.readouterr().err
