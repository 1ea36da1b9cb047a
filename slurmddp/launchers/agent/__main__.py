"""Run the agent of this node: `python -m slurmddp.launchers.agent RUN_DIR`."""

import sys

from slurmddp.launchers.agent.agent import main

if __name__ == "__main__":
    sys.exit(main())
