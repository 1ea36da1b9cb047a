"""The part of the API that saves and loads: on the disk, in the memory of the nodes, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.errors import ConfigError
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
        self,
        root: str | Path | int | None = None,
        step: int | None = None,
        *,
        keep_last: int = 3,
        wait: bool = True,
        **objects: Any,
    ) -> Path:
        """Write a checkpoint of `objects`, of the loaders and of every rank's randomness; all ranks call it.

            d.save(step, model=model, optimizer=optimizer)
            d.save("/shared/fit", step, model=model, optimizer=optimizer)

        `root` is the folder of all checkpoints, and may be left out. It is then `checkpoints` in the run
        folder of a job of slurmddp, else `checkpoints` in the working directory. An object has `state_dict`
        and `load_state_dict`, or is a dict of plain values. Global rank 0 writes; all ranks return the
        checkpoint's folder when it is durable, or all raise. Without `wait` they return once the state is
        copied into memory, from which another process writes it, also when this one is killed; what goes
        wrong there is raised by the next `save`, by `finish_saving` or by `close`.
        """
        folder, number = _root_and_step(root, step)
        session, started = self._session, time.monotonic()
        saved = saving.save(folder, number, objects, session, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        if wait:
            self._stop.saved(time.monotonic() - started)
        return saved

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

        A rank that dies is replaced by slurmddp's agent, and `load` then resumes from there if nothing newer
        is under `root`. Where there is no memory for a copy, or no agent, nothing is kept, and that is no
        error. Returns what rank 0 has `told`, a small value, and the seconds that it took on this rank.
        """
        done = saving.keep_in_memory(Path(root), step, objects, self._session, told)
        self._stop.stood_still()
        return done

    @shown_as("saving")
    def test_save(
        self, root: str | Path | None = None, *, keep_last: int = 3, wait: bool = True, **objects: Any
    ) -> float:
        """Do all that `save` would but leave nothing behind; return the seconds it took. All ranks call it.

        Before the first step it finds a full disk, a used-up quota, a folder that can't be written to, or an
        object that can't be stored; the room that torch's optimizers need later on is counted in. The memory
        for saves (without `wait`, say) is taken meanwhile.
        """
        session, started = self._session, time.monotonic()
        seconds = saving.rehearse(_root(root), objects, session, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        self._stop.saved(time.monotonic() - started)
        return seconds

    @shown_as("loading")
    def load(
        self, root: str | Path | None = None, *, allow_other_config: bool = False, **objects: Any
    ) -> int | None:
        """Give `objects` the state of the newest good checkpoint under `root` and return its step.

            step = d.load(model=model, optimizer=optimizer) or 0

        Without `root` it looks where `save` without `root` writes. It returns None, and changes nothing, when
        there is no checkpoint; it changes nothing either when it raises because one does not fit. All ranks
        call it, after all setup_ methods; rank 0 chooses. A checkpoint of another `config` is loaded only
        with `allow_other_config`, or SLURMDDP_ALLOW_OTHER_CONFIG=1. Ranks that take the place of others go
        on from the state in their nodes' memory if it is as new.
        """
        found = loading.load(
            _root(root),
            objects,
            self._session,
            allow_other_config=allow_other_config or os.environ.get(ALLOW_OTHER_CONFIG_VARIABLE) == "1",
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


def _root(root: str | Path | None) -> Path:
    """Return the folder of the checkpoints; without a name, that of the run around this process if any."""
    if root is not None:
        return Path(root)
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    return RunFolder(run_dir).checkpoints_dir if run_dir else Path("checkpoints")


def _root_and_step(root: str | Path | int | None, step: int | None) -> tuple[Path, int]:
    """Return the two first arguments of `save`, of which the root may be left out."""
    if step is None and not isinstance(root, (str, os.PathLike)):
        root, step = None, root
    if step is None or isinstance(root, int):
        raise ConfigError(
            f"save() was given root={root!r} and step={step!r}.",
            hint="Call save(step, model=model), or save(folder, step, model=model).",
        )
    return _root(root), step
