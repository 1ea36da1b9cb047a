"""`slurmddp list -n N` where N is no number of runs."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_CONFIG

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("given", ["0", "-3"])
def test_less_than_one_run_is_refused_and_not_taken_for_no_runs(make_run, slurm, capsys, given):
    make_run()
    assert main(["list", "-n", given]) == EXIT_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--limit is {given}. Give at least 1, or --all." in err
    assert "no runs yet" not in err
