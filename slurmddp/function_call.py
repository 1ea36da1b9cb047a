"""Call a function as this rank, and keep what rank 0 returns: the program of `slurmddp.submit`.

python -m slurmddp.function_call RUN package.module.function '[1, "two"]'
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Sequence

from slurmddp import plugins
from slurmddp.host.atomic_file import replacing
from slurmddp.runs.folder.layout import RunFolder


def main(words: Sequence[str]) -> None:
    """Call the function with its arguments.

    Args:
        words: the run folder, the import path of the function, and its arguments as a list in JSON.
    """
    run, path, text = words
    # The rank has put the run folder in place of `{run_dir}`, also inside of the JSON.
    arguments = json.loads(text.replace(run, json.dumps(run)[1:-1]))
    value = plugins.locate(path, key="The function")(*arguments)
    if os.environ.get("RANK", "0") == "0":
        with replacing(RunFolder(run).result_file) as stream:
            pickle.dump(value, stream)


if __name__ == "__main__":
    main(sys.argv[1:])
