"""Each action gives Python and `--json` the same result."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.cli.main import main
from slurmddp.control.cancel import cancel
from slurmddp.control.checkpoints import checkpoints
from slurmddp.control.diff import diff
from slurmddp.control.explain import explain
from slurmddp.control.export import export
from slurmddp.control.json_encoding import from_json
from slurmddp.control.listing import list_runs
from slurmddp.control.logs import logs
from slurmddp.control.report import report
from slurmddp.control.status import RunDetails, status
from slurmddp.control.stop import stop
from slurmddp.runs import sweeps
from slurmddp.runs.folder.jsonl import append_line
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere", "slurm")

ACTIONS: dict[str, Callable[[], Any]] = {
    "status one": lambda: status("one"),
    "status tune": lambda: status("tune"),
    "list": list_runs,
    "list tune": lambda: list_runs("tune"),
    "report tune": lambda: report("tune"),
    "list --state failed --name o": lambda: list_runs(states=["failed"], name="o"),
    "logs one --rank 3": lambda: logs("one", ranks=[3]),
    "logs two -n all --all": lambda: logs("two", everything=True, lines=None),
    "report one": lambda: report("one"),
    "explain one": lambda: explain("one"),
    "diff one two": lambda: diff("one", "two"),
    "checkpoints one --verify": lambda: checkpoints("one", verify=True),
    "export one --force": lambda: export("one", force=True),
    "stop tune-sweep": lambda: stop("tune-sweep"),
    "cancel tune-sweep": lambda: cancel("tune-sweep"),
}


@pytest.fixture
def runs(make_run) -> None:
    """Make a run that has failed, a run that has finished with other settings, and a sweep of both."""
    for name, outcome, code in (("one-00000001", "failed", 137), ("two-00000002", "finished", 0)):
        folder = make_run(name)
        folder.config_file.write_text(
            f"name: {name[:3]}\ntrain: {{steps: 400}}\noptimizer: {{lr: 0.{code}}}\n"
        )
        submit(folder)
        start(folder)
        folder.rank_log(0, 3).write_text("boom\n")
        append_line(folder.metrics_file, {"step": 9, "attempt": 0, "time": 1.0, "loss": 2.5, "accuracy": 0.5})
        left = {"rank": 3, "host": "node4", "exit_code": code, "signal": None, "last_lines": ["boom"]}
        if code:
            folder.failure_file(0).write_text(json.dumps(left))
        end(folder, outcome, code=code)
        weights = OrderedDict(weight=torch.ones(2))
        checkpoint.write(
            folder.checkpoints_dir, 9, {"objects": {"model": weights}}, meta={"world_size": 4}, keep_last=3
        )

    points = [(name, [f"seed={name}"]) for name in ("two-00000002", "one-00000001", "tri-00000003")]
    sweeps.write(folder.path.parent, "tune-sweep-0a1b2c3d", points)


@pytest.mark.parametrize("command", ACTIONS)
def test_python_and_json_get_the_same_result(runs, capsys, command: str) -> None:
    main([*command.split(), "--json"])
    document = json.loads(capsys.readouterr().out)
    result = ACTIONS[command]()
    read = from_json(type(result), document)
    if isinstance(result, RunDetails):
        read = replace(read, time=result.time)
    assert read == result
