"""Run the agent of this node: `python -m slurmddp.launchers.agent RUN_DIR`."""

import os
import sys

# `python -m` has put the working folder, the project, first in the search path. The project's modules must
# not shadow modules of Python that the next import needs.
PROJECT = [] if getattr(sys.flags, "safe_path", False) else [sys.path.pop(0)]

from slurmddp.launchers.agent.agent import main  # noqa: E402

sys.path[:0] = PROJECT

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the finalization of the interpreter, which takes a quarter of a second once torch is imported.
    os._exit(code)
