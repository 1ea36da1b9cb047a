"""Run the `slurmddp` command as `python -m slurmddp`."""

import sys

from slurmddp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
