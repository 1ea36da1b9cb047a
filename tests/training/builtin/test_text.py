"""Text as data: what is read, what is held out, how characters become tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from slurmddp.errors import ConfigError
from slurmddp.training.builtin.text import CHARACTERS, VOCAB_SIZE, SourceText, Windows
from support import ROOT

encode, decode = SourceText.encode, SourceText.decode


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def all_text(windows: Windows) -> str:
    return "".join(decode(windows[i][0]) for i in range(len(windows)))


def test_every_character_comes_back() -> None:
    assert decode(encode(CHARACTERS)) == CHARACTERS
    assert len(set(encode(CHARACTERS).tolist())) == VOCAB_SIZE - 1
    assert decode(encode("a\rb\xe9")) == "a?b??"


def test_samples_follow_each_other_and_targets_are_one_ahead(tmp_path: Path) -> None:
    data = SourceText(context=4, path=str(write(tmp_path, a_py="abcdefghijk")), heldout_percent=0)
    assert len(data) == 2
    assert [decode(part) for part in data[0]] == ["abcd", "bcde"]
    assert [decode(part) for part in data[1]] == ["efgh", "fghi"]
    assert data[0][0].dtype == torch.int64
    with pytest.raises(IndexError):
        data[2]


def test_whole_files_are_held_out_and_no_other_file_changes_that(tmp_path: Path) -> None:
    texts = {f"{chr(97 + i)}_py": chr(97 + i) * 40 for i in range(20)}
    write(tmp_path, **texts)
    data = SourceText(context=1, path=str(tmp_path), heldout_percent=30)
    kept, held = set(all_text(data)), set(all_text(data.heldout()))
    assert kept
    assert held
    assert not kept & held
    write(tmp_path, extra_py="z" * 40)
    assert held <= set(all_text(SourceText(context=1, path=str(tmp_path), heldout_percent=30).heldout())) | {
        "z"
    }


def test_packages_and_tests_are_left_out_and_the_pattern_counts(tmp_path: Path) -> None:
    write(
        tmp_path, **{"a_py": "a" * 9, "site-packages__b_py": "b" * 9, "test__c_py": "c" * 9, "d.txt": "d" * 9}
    )
    assert set(all_text(SourceText(context=2, path=str(tmp_path), heldout_percent=0))) == {"a"}
    text = SourceText(context=2, path=str(tmp_path), pattern="*.txt", heldout_percent=0)
    assert set(all_text(text)) == {"d"}


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    file = write(tmp_path, a_py="a" * 80 + "b" * 20) / "a.py"
    for path in (file, tmp_path):
        data = SourceText(context=1, path=str(path), heldout_percent=20)
        assert set(all_text(data)) == {"a"}
        assert set(all_text(data.heldout())) == {"b"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/nowhere/at/all"}, "'/nowhere/at/all', which does not exist"),
        ({"pattern": "*.none"}, "hold 0 characters"),
        ({"pattern": "/etc/*"}, r"data\.pattern is '/etc/\*'"),
        ({"context": 0}, r"data\.context is 0"),
        ({"context": 1000}, "too few for one window of 1000"),
        ({"heldout_percent": 100}, r"data\.heldout_percent is 100"),
    ],
)
def test_data_that_can_not_be(tmp_path: Path, options, message: str) -> None:
    write(tmp_path, a_py="abc", b_py="cde")
    with pytest.raises(ConfigError, match=message):
        SourceText(**{"context": 2, "path": str(tmp_path), **options})


def test_the_standard_library_is_enough_and_fits_the_shipped_models() -> None:
    data = SourceText(context=128)
    assert len(data) > 30_000
    assert 0.003 < len(data.heldout()) / len(data) < 0.1
    for name in ("gpt_small", "gpt_tiny"):
        model = yaml.safe_load((ROOT / "slurmddp/conf/model" / f"{name}.yaml").read_text())
        assert model["vocab_size"] == data.vocab_size
    assert all_text(data)[:100].isascii()
