"""Run the agent of this node: `python -m slurmddp.launchers.agent RUN_DIR`."""

import os
import sys

from slurmddp.launchers.agent.agent import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Taking an interpreter that holds torch apart costs a quarter of a second.
