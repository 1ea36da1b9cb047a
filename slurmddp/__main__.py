"""`python -m slurmddp` is the `slurmddp` command."""

import sys

from slurmddp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
