"""Run the agent of this node: `python -m slurmddp.launchers.agent RUN_DIR`."""

import os
import sys

# `python -m` has put the working folder first, the project: its modules must not stand in for Python's own.
PROJECT = [] if getattr(sys.flags, "safe_path", False) else [sys.path.pop(0)]

from slurmddp.launchers.agent.agent import main  # noqa: E402

sys.path[:0] = PROJECT

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Taking an interpreter that holds torch apart costs a quarter of a second.
