"""The part of the API that saves and loads: on the disk, in the memory of the nodes, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from slurmddp.checkpoint.config_match import ALLOW_VARIABLE
from slurmddp.errors import ConfigError
from slurmddp.runs.checkpoints import folder_name, newest_step
from slurmddp.runs.folder import RunFolder
from slurmddp.training import loading, saving
from slurmddp.training.bootstrap import Place
from slurmddp.training.loader import DistributedLoader
from slurmddp.training.metrics import Journal, run_with
from slurmddp.training.progress import Progress, shown_as
from slurmddp.training.saves import Saves
from slurmddp.training.saving import Session
from slurmddp.training.start_up import StartUp
from slurmddp.training.stop_poll import StopPoll


class Persistence:
    """What `Distributon` can do about checkpoints; all ranks call each of these, in the same order."""

    _loaders: list[DistributedLoader]
    _seed: int | None
    _config: Mapping[str, Any] | None
    _stop: StopPoll
    _progress: Progress
    start_up: StartUp
    _saves: Saves | None = None
    _journal: Journal | None = None
    """The record of the run; `load` opens it if the run's checkpoints are loaded."""
    _is_stop_recorded = False
    resumed_from: str | None = None
    """Where `load` found the state: `memory` or `disk`."""

    @property
    def _here(self) -> Place:
        raise NotImplementedError

    @property
    def stop_reason(self) -> str | None:
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
        session.saves.run_folder = run_with(folder)
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
        self.start_up.lap("checkpoint")
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
        folder = _root(root)
        newest = self._open_journal(folder)
        found = loading.load(
            folder,
            objects,
            self._session,
            allow_other_config=allow_other_config or os.environ.get(ALLOW_VARIABLE) == "1",
            device=self._here.device,
        )
        step, self.resumed_from = (None, None) if found is None else found
        self._progress.resumed(step or 0)
        self._record_start(newest, step)
        return step

    def _open_journal(self, root: Path) -> int | None:
        """Begin to record this training if `root` is its run's; return the newest step there on rank 0."""
        self.start_up.lap("model")
        run, is_zero = run_with(root), self._here.info.rank == 0
        if run is None:
            return None
        self._journal = Journal(run, active=is_zero)
        self._progress.on_first_step = self._record_first_step
        with suppress(OSError):  # `loading.load` tries again, on all ranks.
            return newest_step(root) if is_zero else None
        return None

    def _record_start(self, newest: int | None, used: int | None) -> None:
        """Record from which step training resumes, and whether a newer checkpoint was of no use."""
        self.start_up.lap("checkpoint")
        if self._journal is None:
            return
        if newest is not None and (used is None or used < newest):
            before = f"; it resumes from step {used}, the newest that verifies."
            text = f"Checkpoint {folder_name(newest)} can't be used" + (
                ", nor can any before it: it starts at step 0." if used is None else before
            )
            text += " `slurmddp checkpoints RUN` lists them, the log says why."
            self._journal.event("warned", about="checkpoint", text=text)
        if used is not None:
            self._journal.event("resumed", step=used, **{"from": self.resumed_from})

    def _record_first_step(self, step: int) -> None:
        self.start_up.lap("first_step")
        if self._journal is not None:
            self._journal.event("first_step", step=step, phases=self.start_up.seconds)

    def record_stop(self) -> None:
        """Record that the training stops now, and why; `should_stop` does so when it returns True."""
        if self._journal is not None and not self._is_stop_recorded:
            self._is_stop_recorded = True
            self._journal.event("signalled", **_who(self.stop_reason or "a request"))

    @property
    def keeps_memory(self) -> bool:
        """Whether there is an agent, which hands a state in memory on to the ranks that replace these."""
        return self._session.saves.has_agent

    def _close_saves(self) -> None:
        if self._saves is not None:
            try:
                self.finish_saving()
            finally:
                self._saves.close()
                self._saves = None


def _root(root: str | Path | None) -> Path:
    """Return `root`, or by default the checkpoints folder of the run, or `./checkpoints` outside of a run."""
    if root is not None:
        return Path(root)
    run_dir = os.environ.get("SLURMDDP_RUN_DIR")
    return RunFolder(run_dir).checkpoints_dir if run_dir else Path("checkpoints")


def _who(reason: str) -> dict[str, Any]:
    """Return signal and rank of a reason such as `SIGTERM on rank 3 (node7)`, for the record."""
    words = reason.split()
    if len(words) >= 4 and words[1:3] == ["on", "rank"] and words[3].isdigit():
        return {"signal": words[0], "rank": int(words[3])}
    return {"signal": reason, "rank": None}


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
