"""The data of test_stop_hanging: a sample that never comes, in the second batch of an accumulated step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from support.distributed.exact_jobs import Blurred


class Hanging(Blurred):
    """Sleeps for an hour when a process of the ranks HANG_RANKS reads its sample HANG_AT."""

    _read = 0

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self._read += 1
        hangs = os.environ["RANK"] in os.environ.get("HANG_RANKS", "").split(",")
        if hangs and self._read == int(os.environ["HANG_AT"]):
            Path(os.environ["SLURMDDP_RUN_DIR"], f"hangs-{os.environ['RANK']}").touch()
            time.sleep(3600)
        return super().__getitem__(index)
