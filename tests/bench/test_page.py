"""A result as text and as a page: units, sentences, pictures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slurmddp.bench.page import cell, notes, show, write_bench_page
from slurmddp.bench.settings import BENCHES
from support.runs.bench_results import bench_result


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("median_s", 0.0123, "12.3 ms"),
        ("exposed_s", -2e-5, "-20 us"),
        ("mean_s", 3.0, "3 s"),
        ("bytes", 64_000, "64kB"),
        ("bytes_sent", 1_504, "1.5 kB"),
        ("bus_bytes_per_s", 2.5e9, "2.5 GB/s"),
        ("equals_one_process", False, "no"),
        ("efficiency", 0.98765, "0.988"),
        ("ranks", 4, "4"),
    ],
)
def test_the_name_of_a_column_tells_its_unit(name: str, value: object, shown: str) -> None:
    assert cell(name, value) == shown


@pytest.mark.parametrize("bench", BENCHES)
def test_each_benchmark_has_text_and_a_page_with_pictures(bench: str, tmp_path: Path) -> None:
    result, stream = bench_result(bench), io.StringIO()
    show(result, stream)
    assert stream.getvalue().startswith(f"{bench}: 4 ranks on 2 nodes, cpu, gloo. torch 2.13.")
    write_bench_page(result, tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text()
    pictures = 2 if bench == "collectives" else 1
    assert page.count("<svg") == 2 * pictures  # for a wide window and for a narrow one


def test_sentences_tell_the_error_of_the_model_and_unequal_weights() -> None:
    (model,) = notes(bench_result("collectives"))
    assert "2 us per message" in model and "median error of 10%" in model and "(4kB)" in model
    unequal, missing = notes(bench_result("strategies"))
    assert "local_sgd ends with other weights" in unequal
    assert missing == "x was not measured: No."
