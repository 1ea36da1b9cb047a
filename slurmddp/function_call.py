"""The program that `slurmddp.submit` runs on each rank: call a function; rank 0 stores its return value.

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


def main(command_line: Sequence[str]) -> None:
    """Call a function on this rank; rank 0 stores the return value in the run folder.

    Args:
        command_line: the run folder, the import path of the function, and its arguments as a JSON list.
    """
    run_dir, function_path, text = command_line
    # slurmddp has replaced `{run_dir}` by the path of the run folder in the whole command line, also inside
    # the JSON text. The path may contain characters that JSON escapes, such as quotes, so it is escaped here.
    arguments = json.loads(text.replace(run_dir, json.dumps(run_dir)[1:-1]))

    value = plugins.locate(function_path, key="The function")(*arguments)
    if os.environ.get("RANK", "0") == "0":
        _store(value, RunFolder(run_dir))


def _store(value: Any, folder: RunFolder) -> None:
    """Write the function's return value into the run folder; remove a return value in the other format.

    The format is JSON for a value that JSON restores exactly, else pickle.
    """
    if is_plain(value):
        content = json.dumps(value).encode()
        path = folder.plain_result_file
        other_path = folder.result_file
    else:
        content = pickle.dumps(value)
        path = folder.result_file
        other_path = folder.plain_result_file

    with replacing(path) as stream:
        stream.write(content)
    other_path.unlink(missing_ok=True)


def is_plain(value: Any) -> bool:
    """Return whether JSON restores a value with equal types; False for tuples, which would become lists."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    return value is None or type(value) in (bool, int, float, str)


if __name__ == "__main__":
    main(sys.argv[1:])
