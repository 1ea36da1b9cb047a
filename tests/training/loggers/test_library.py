"""A process that is forked while a library is imported can import it as well."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from slurmddp.training.loggers.library import imported


def test_a_fork_waits_for_an_import(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "slowly_imported.py").write_text(
        "import time, threading\nwaits = threading.Event\nBEGUN.set()\ntime.sleep(0.3)\nDONE = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    begun = threading.Event()
    monkeypatch.setattr("builtins.BEGUN", begun, raising=False)
    thread = threading.Thread(target=imported, args=("slowly_imported",))
    thread.start()
    assert begun.wait(240)
    if (child := os.fork()) == 0:
        # An unfinished import would have no DONE, and its lock would never be released here.
        os._exit(0 if getattr(sys.modules.get("slowly_imported"), "DONE", False) else 1)
    thread.join()
    del sys.modules["slowly_imported"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
