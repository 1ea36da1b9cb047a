"""An evaluation that a stop cuts short is made up for, also when the ranks agree to stop a step later."""

from __future__ import annotations

from pathlib import Path

import cut_jobs
import pytest
from ranks import run_ranks
from test_trainer import curve, make_config, new_folder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.mark.parametrize(("world_size", "batch"), [(1, 12), (2, 6)])
def test_a_cut_evaluation_is_measured_after_the_resume(tmp_path: Path, world_size: int, batch: int) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    config = make_config(text, eval_batches=8)
    whole, cut = new_folder(tmp_path / "whole"), new_folder(tmp_path / "cut")
    run_ranks(cut_jobs.train_with_late_agreement, world_size, config, str(whole.path), None)
    # Each evaluation has eight batches in all, so the stop falls into the one after step 4.
    ends = run_ranks(cut_jobs.train_with_late_agreement, world_size, config, str(cut.path), batch)
    assert all("Stopped at step" in end for end in ends), ends
    run_ranks(cut_jobs.train_with_late_agreement, world_size, config, str(cut.path), None)
    assert curve(cut) == curve(whole)
