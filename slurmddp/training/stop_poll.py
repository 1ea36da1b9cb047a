"""The stop signals of this process and the agreement of all ranks about them, made when first needed.

A program that never asks whether to stop has to end on SIGTERM as usual, so nothing happens before it asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slurmddp.runs.folder import RunFolder
from slurmddp.training.bootstrap import Place
from slurmddp.training.signals import StopSignals
from slurmddp.training.stop import StopAgreement


class StopPoll:
    """Asks once per step; `signals` are handlers that stand already and stay after `close`."""

    def __init__(self, signals: StopSignals | None) -> None:
        self._signals, self._own_signals = signals, signals is None
        self._agreement: StopAgreement | None = None

    def tick(self, place: Place) -> bool:
        if self._agreement is None:
            if self._signals is None:
                self._signals = StopSignals().__enter__()
            info = place.info
            # One rank looks for the file: a thousand that did would load a shared file system.
            file = _stop_file(os.environ) if info.rank == 0 else None
            self._agreement = StopAgreement(
                place.store, info.rank, info.world_size, signals=self._signals, stop_file=file
            )
        return self._agreement.tick()

    @property
    def requested(self) -> bool:
        if self._agreement is not None:
            return self._agreement.requested
        return self._signals is not None and self._signals.received is not None

    @property
    def reason(self) -> str | None:
        return self._agreement.reason if self._agreement else None

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        if self._own_signals and self._signals is not None:
            self._signals.__exit__(None, None, None)
            self._signals = None


def _stop_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file by which a person stops this run; None outside a run folder."""
    run_dir = environ.get("SLURMDDP_RUN_DIR")
    return RunFolder(run_dir).stop_file if run_dir else None
