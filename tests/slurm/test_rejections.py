"""Errors that a second try may cure, and advice about the others."""

from __future__ import annotations

import pytest

from slurmddp.slurm.rejections import hint_for, is_transient

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    "text",
    [
        f"{FAILED}Socket timed out on send/recv operation",
        f"{FAILED}Unable to contact slurm controller (connect failure)",
        f"{FAILED}Unexpected message received",
        f"{FAILED}Unable to create job record, try again",
        f"{FAILED}Resource temporarily unavailable",
        f"Use our portal next time.\n{FAILED}Zero Bytes were transmitted or received.",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "sacct: error: Sending PersistInit msg: Connection refused",
        "Unable to contact slurm controller (connect failure).",
        "Job update not available right now, the DB index is being set, try again in a bit for job 4",
        "4_[2]: Job update not available right now, the DB index is being set, try again in a bit",
    ],
)
def test_an_answer_that_did_not_come_may_come_later(text: str) -> None:
    assert is_transient(text)


@pytest.mark.parametrize(
    "text",
    [
        f"sbatch: error: No project. Add --account=PROJECT and try again.\n{FAILED}Unspecified error",
        "sbatch: error: lua: Your session timed out. Please try again.\nsbatch: error: cli_filter failed",
        f"sbatch: Unable to contact slurm controller is no excuse\n{FAILED}Invalid account",
        "Connection refused by policy: jobs need a project. Set one and try again.",
        f"sbatch: error: Connection refused\n{FAILED}Invalid partition name specified",
        "allocation failure: Requested node configuration is not available",
    ],
)
def test_a_refusal_is_final_whatever_words_a_site_adds(text: str) -> None:
    assert not is_transient(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sbatch: unrecognized option '--parsable'", "slurmddp sends this option itself"),
        (
            "Usage: sbatch SCRIPT\nsbatch: error: unrecognized arguments: --parsable",
            "Put SLURM's sbatch before",
        ),
        ("Error: No such option: --test-only", "Put SLURM's sbatch before"),
        ("sbatch: unrecognized option '--qoss'", "under `sbatch:`"),
        ("Error: No such option: --qoss", "under `sbatch:`"),
        ("sbatch: error: Job arrays are not allowed here", "submitter=submitit"),
        ("Requested node configuration is not available", "MemSpecLimit"),
        (f"sbatch: error: The licence server timed out, try again.\n{FAILED}Unspecified error", "A rule of"),
        (
            "sbatch: error: cli_filter/lua: Socket timed out is no excuse, use --account.",
            "A rule of the site",
        ),
        (
            "sbatch: error: lua: Your memory specification needs a project.\n"
            "sbatch: error: cli_filter plugin terminated with error",
            "A rule of the site",
        ),
        ("slurm_load_node: Access/permission denied", "PrivateData"),
        ("scancel: error: Kill job error on job id 7: Access/permission denied", "owner of the job"),
        (f"{FAILED}Unspecified error", "SLURM's own words"),
        (
            "sbatch: fatal: --segment=2 does not fit the job size (3): node count must be evenly divisible",
            "change nodes= or spare_nodes=",
        ),
        (
            "sbatch gave no answer within 60 s. It printed: sbatch: error: Slurm job queue full, sleeping.",
            "MaxJobCount",
        ),
        (f"{FAILED}MaxJobCount limit reached", "as many jobs as it can hold"),
        ("sbatch: option '--requeue' doesn't allow an argument", "`requeue: expedite`"),
        (f"{FAILED}Requested operation not supported on this system", "`requeue: expedite`"),
    ],
)
def test_the_hint_fits_what_slurm_says(text: str, words: str) -> None:
    assert words in hint_for(text)
