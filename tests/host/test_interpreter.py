"""The end of a forked program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDS = """
import os, threading
from slurmddp.host import interpreter

class Group:
    def __init__(self): self.peer = self
    def __del__(self): threading.Event().wait()

Group()
file = open("result", "w")
file.write("all of it")
interpreter.finish(0)
os._exit(0)
"""


def test_the_end_writes_files_and_waits_for_no_destructor(tmp_path: Path) -> None:
    """The destructor of a process group waits for a thread, which waits for the interpreter lock."""
    subprocess.run([sys.executable, "-c", ENDS], cwd=tmp_path, check=True, timeout=240)
    assert (tmp_path / "result").read_text() == "all of it"
