"""The part of the API that saves and loads: on the disk, in the memory of the nodes, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from slurmddp.checkpoint.config_match import ALLOW_VARIABLE
from slurmddp.runs.folder import RunFolder
from slurmddp.training import loading, saving
from slurmddp.training.bootstrap import Place
from slurmddp.training.loader import DistributedLoader
from slurmddp.training.progress import Progress, shown_as
from slurmddp.training.saves import Saves
from slurmddp.training.saving import Session
from slurmddp.training.stop_poll import StopPoll


class Persistence:
    """What `Distributon` can do about checkpoints; all ranks call each of these, in the same order."""

    _loaders: list[DistributedLoader]
    _seed: int | None
    _config: Mapping[str, Any] | None
    _stop: StopPoll
    _progress: Progress
    _saves: Saves | None = None
    resumed_from: str | None = None
    """Where `load` found the state: `memory` or `disk`."""

    @property
    def _here(self) -> Place:
        raise NotImplementedError

    def unwrap(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    @property
    def _session(self) -> Session:
        place = self._here
        if self._saves is None:
            self._saves = Saves(os.environ, place.info)
            self._saves.on_durable = self._stop.saved
            self._stop.is_writing = lambda: self._saves is not None and self._saves.busy
        return Session(
            loaders=self._loaders,
            unwrap=self.unwrap,
            seed=self._seed,
            config=self._config,
            saves=self._saves,
        )

    @shown_as("saving")
    def save(
        self, root: str | Path, step: int, *, keep_last: int = 3, wait: bool = True, **objects: Any
    ) -> Path:
        """Write a checkpoint of `objects`, of the loaders and of every rank's randomness; all ranks call it.

        An object has `state_dict` and `load_state_dict`, or is a dict of plain values. Global rank 0 writes;
        all ranks return its folder when it is durable, or all raise. Without `wait` they return once the
        state is copied into memory, from which another process writes it, also when this one is killed; what
        goes wrong there is raised by the next `save`, by `finish_saving` or by `close`.
        """
        session, started = self._session, time.monotonic()
        folder = saving.save(Path(root), step, objects, session, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        if wait:
            self._stop.saved(time.monotonic() - started)
        return folder

    @shown_as("saving")
    def finish_saving(self) -> None:
        """Return when all that was saved without `wait` is durable, or raise on all ranks why it is not."""
        if self._saves is not None and self._saves.unfinished:
            saving.finish(self._saves)
            self._stop.stood_still()

    @shown_as("saving")
    def memory_save(
        self, root: str | Path, step: int, *, told: Any = None, **objects: Any
    ) -> tuple[Any, float]:
        """Copy what `save` would write into the memory of each node; nothing goes to the disk.

        A rank that dies is replaced by slurmddp's agent, and `load` then goes on from there if nothing newer
        is under `root`. Where there is no memory for a copy, or no agent, nothing is kept, and that is no
        error. Returns what rank 0 has `told`, a small value, and the seconds that it took on this rank.
        """
        done = saving.keep_in_memory(Path(root), step, objects, self._session, told)
        self._stop.stood_still()
        return done

    @shown_as("saving")
    def test_save(self, root: str | Path, *, keep_last: int = 3, wait: bool = True, **objects: Any) -> float:
        """Do all that `save` would but leave nothing behind; return the seconds it took. All ranks call it.

        Before the first step it finds a full disk, a used-up quota, a folder that can't be written to, or an
        object that can't be stored; the room that torch's optimizers need later on is counted in. The memory
        for saves (without `wait`, say) is taken meanwhile.
        """
        session, started = self._session, time.monotonic()
        seconds = saving.rehearse(Path(root), objects, session, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        self._stop.saved(time.monotonic() - started)
        return seconds

    @shown_as("loading")
    def load(self, root: str | Path, *, allow_other_config: bool = False, **objects: Any) -> int | None:
        """Give `objects` the state of the newest good checkpoint under `root` and return its step.

        Returns None, and changes nothing, when there is no checkpoint; changes nothing either when it raises
        because one does not fit. All ranks call it, after all setup_ methods; rank 0 chooses. A checkpoint of
        another `config` is loaded only with `allow_other_config`, or SLURMDDP_ALLOW_OTHER_CONFIG=1. Ranks
        that take the place of others go on from the state in their nodes' memory if it is as new.
        """
        found = loading.load(
            Path(root),
            objects,
            self._session,
            allow_other_config=allow_other_config or os.environ.get(ALLOW_VARIABLE) == "1",
            device=self._here.device,
        )
        step, self.resumed_from = (None, None) if found is None else found
        self._progress.resumed(step or 0)
        return step

    @property
    def keeps_memory(self) -> bool:
        """Whether there is an agent, which hands a state in memory on to the ranks that replace these."""
        return self._session.saves.has_agent

    def record_saves(self, folder: RunFolder) -> None:
        """Have an event `saved` written into `folder` for each checkpoint once it is durable."""
        self._session.saves.run_folder = folder

    def _close_saves(self) -> None:
        if self._saves is not None:
            try:
                self.finish_saving()
            finally:
                self._saves.close()
                self._saves = None
