from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import ConfigError
from slurmddp.slurm.units import parse_duration_s, parse_minutes, parse_slurm_limit, render_minutes


@pytest.mark.parametrize(
    ("value", "minutes"),
    [
        (90, 90),
        ("90", 90),
        ("90m", 90),
        ("2h", 120),
        ("1d12h", 2160),
        ("1h30m", 90),
        ("30s", 1),
        ("45:00", 45),
        ("45:01", 46),
        ("01:30:00", 90),
        ("01:30:01", 91),
        ("24:00:00", 1440),
        ("100:00:00", 6000),
        ("2-00", 2880),
        ("1-06:30", 1830),
        ("1-06:30:00", 1830),
        (" 00:10:00 ", 10),
    ],
)
def test_spellings_of_a_time_limit(value: str | int, minutes: int) -> None:
    assert parse_minutes(value) == minutes


@pytest.mark.parametrize(
    "value",
    ["", "soon", "1:2:3:4", "10:99:00", "1-10:99", "5:75", "-5", "1.5h", "2 hours", "1-", True, 1.5, None],
)
def test_what_is_no_time_is_refused_with_the_forms(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a time") as caught:
        parse_minutes(value)  # type: ignore[arg-type]
    assert "HH:MM:SS" in caught.value.hint


@pytest.mark.parametrize("value", [0, "0", "00:00:00", "0m"])
def test_no_time_at_all_is_refused(value: str | int) -> None:
    with pytest.raises(ConfigError, match="is not above 0"):
        parse_minutes(value)


def test_a_duration_keeps_its_seconds_and_an_error_names_its_key() -> None:
    assert [parse_duration_s(one, "train.max_time") for one in ("90s", "01:30:01", 2)] == [90, 5401, 120]
    with pytest.raises(ConfigError, match=r"^train.max_time='soon' is not a time"):
        parse_duration_s("soon", "train.max_time")


@pytest.mark.parametrize(
    ("minutes", "text"), [(1, "00:01:00"), (90, "01:30:00"), (1440, "1-00:00:00"), (1830, "1-06:30:00")]
)
def test_rendering(minutes: int, text: str) -> None:
    assert render_minutes(minutes) == text


@given(st.integers(min_value=1, max_value=10**6))
def test_what_is_rendered_is_read_back(minutes: int) -> None:
    assert parse_minutes(render_minutes(minutes)) == minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", None),
        ("infinite", None),
        ("", None),
        ("NONE", None),
        ("1-00:00:00", 1440),
        ("60", 60),
        ("01:00:00", 60),
    ],
)
def test_limits_as_slurm_prints_them(text: str, minutes: int | None) -> None:
    assert parse_slurm_limit(text) == minutes
