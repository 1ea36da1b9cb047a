"""The axes of parallel coordinates."""

from __future__ import annotations

import pytest

from slurmddp.runs.report.parallel import number_axis, setting_axis


@pytest.mark.parametrize(
    ("values", "places", "ticks"),
    [
        ([1e-3, 1e-4, 1e-2], (0.5, 0, 1), ["0.0001", "0.001", "0.01"]),
        (["b", "a", "b"], (0, 1, 0), ["b", "a"]),
        ([None, 4, 4], (0, 1, 1), ["-", "4"]),
        ([True, False], (0, 1), ["true", "false"]),
        ([3, 3], (0.5, 0.5), ["3"]),
        ([1, 1.5, "auto"], (0, 0.5, 1), ["1", "1.5", "auto"]),
        (["a" * 30, "b"], (0, 1), ["a" * 15 + "...", "b"]),
        ([0.0, 0.05488135039273248, 0.0137203375981831], (0, 1, 0.25), ["0", "0.0274", "0.0549"]),
    ],
)
def test_few_values_stand_at_equal_distances_numbers_in_their_order(values, places, ticks):
    axis = setting_axis("lr", values)
    assert axis.places == pytest.approx(places)
    assert [text for _, text in axis.ticks] == ticks


def test_many_numbers_lie_on_a_scale_and_many_texts_are_named_in_part():
    axis = setting_axis("width", list(range(11)))
    assert axis.places[1:3] == (0.1, 0.2)
    assert axis.ticks == ((0.0, "0"), (0.5, "5"), (1.0, "10"))
    texts = setting_axis("data", [f"file-{number}" for number in range(15)])
    assert texts.places[7] == 0.5
    assert [text for _, text in texts.ticks] == ["file-0", "file-3", "file-6", "file-9", "file-12"]


@pytest.mark.parametrize(
    ("values", "middle", "text"),
    [([1.0, 2.0, 3.0], 0.5, "2"), ([0.01, 0.1, 1.0], 0.5, "0.1"), ([-1.0, 0.0, 99.0], 0.01, "49")],
)
def test_a_scale_is_logarithmic_if_its_values_span_decades(values, middle, text):
    axis = number_axis("loss", values)
    assert (axis.places[0], axis.places[2]) == (0, 1)
    assert axis.places[1] == pytest.approx(middle)
    assert axis.ticks[1] == (0.5, text)


def test_ticks_of_near_values_have_as_many_digits_as_tell_them_apart():
    axis = number_axis("loss", [1.0907, 1.0789])
    assert [text for _, text in axis.ticks] == ["1.079", "1.085", "1.091"]
    assert len(number_axis("loss", [1.0, 1.0 + 2**-52]).ticks) >= 2
