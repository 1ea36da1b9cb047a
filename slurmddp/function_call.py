"""Call a function as this rank, and keep what rank 0 returns: the program of `slurmddp.submit`.

python -m slurmddp.function_call RUN package.module.function '[1, "two"]'
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

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
        _keep(value, RunFolder(run))


def _keep(value: Any, folder: RunFolder) -> None:
    """Write a value as JSON if JSON gives it back, else as a pickle; remove an earlier result."""
    if is_plain(value):
        content, file, other = json.dumps(value).encode(), folder.plain_result_file, folder.result_file
    else:
        content, file, other = pickle.dumps(value), folder.result_file, folder.plain_result_file
    with replacing(file) as stream:
        stream.write(content)
    other.unlink(missing_ok=True)


def is_plain(value: Any) -> bool:
    """Return whether a value is of those types that JSON gives back."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    return value is None or type(value) in (bool, int, float, str)


if __name__ == "__main__":
    main(sys.argv[1:])
