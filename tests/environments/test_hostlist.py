"""SLURM's host lists are read and written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.environments.hostlist import MAX_HOSTS, compress, expand
from slurmddp.errors import ConfigError

EXPANDED = [
    ("", []),
    ("a", ["a"]),
    ("alpha,beta", ["alpha", "beta"]),
    ("tux2,tux1", ["tux2", "tux1"]),
    ("linux[1,2]", ["linux1", "linux2"]),
    ("a[01-03,7]", ["a01", "a02", "a03", "a7"]),
    ("a[9-10]", ["a9", "a10"]),
    ("a[09-10]", ["a09", "a10"]),
    ("a[9-010]", ["a9", "a10"]),
    ("a[098-101]", ["a098", "a099", "a100", "a101"]),
    ("gpu-node-[1-2],login", ["gpu-node-1", "gpu-node-2", "login"]),
    ("r[0-1]n[08-10]", ["r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10"]),
    ("rack[1-2]-node[03-04]", ["rack1-node03", "rack1-node04", "rack2-node03", "rack2-node04"]),
    ("a[1-2][3-4]", ["a13", "a14", "a23", "a24"]),
    ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    (" \ta b\tc\n,,d ", ["a", "b", "c", "d"]),
    ("a,a", ["a", "a"]),
    ("[1-3]", ["1", "2", "3"]),
    ("x[5]", ["x5"]),
    ("n1.example.org,n2", ["n1.example.org", "n2"]),
]


@pytest.mark.parametrize(("text", "names"), EXPANDED)
def test_expand(text, names):
    assert expand(text) == tuple(names)


@pytest.mark.parametrize(
    "text",
    [
        "a[",
        "a]",
        "a[1",
        "a]1",
        "a[]",
        "a[1,,2]",
        "a[3-1]",
        "a[x-y]",
        "a[1-2-3]",
        "a[-1]",
        "a[[1-2]]",
        "a[ 1]",
    ],
)
def test_nonsense_is_refused_and_shown(text):
    with pytest.raises(ConfigError) as caught:
        expand(text)
    assert repr(text) in caught.value.message
    assert "scontrol show hostnames" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["a[1-70000]", f"a[1-{MAX_HOSTS}],b", "a[1-999]b[1-999]", "a[1-999999999999999999]"]
)
def test_a_list_without_end_is_refused_before_it_fills_the_memory(text):
    with pytest.raises(ConfigError, match="more than 65536 hosts"):
        expand(text)


def test_the_largest_range_is_read():
    assert len(expand(f"a[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["n7"], "n7"),
        (["n1", "n2", "n3", "n5"], "n[1-3,5]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n9", "n10", "n011"], "n[9-10,011]"),
        (["n2", "n1"], "n[2,1]"),
        (["n1", "n1"], "n[1,1]"),
        (["a", "a", "b1", "b2", "a"], "a,a,b[1-2],a"),
        (["localhost", "localhost"], "localhost,localhost"),
    ],
)
def test_compress(names, text):
    assert compress(names) == text


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]", "a]"])
def test_a_name_that_a_list_cannot_hold_is_refused(name):
    with pytest.raises(ConfigError, match="can't be a host name"):
        compress(["ok", name])


NAMES = st.one_of(
    st.from_regex(r"[a-z]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True),
    st.builds(
        lambda prefix, number, width: f"{prefix}{number:0{width}d}",
        st.sampled_from(["n", "node-", "r1n", ""]),
        st.integers(0, 30),
        st.integers(1, 4),
    ),
    st.from_regex(r"n[0-9]{1,25}", fullmatch=True),
)


@settings(deadline=None)
@given(st.lists(NAMES, max_size=60))
def test_what_was_compressed_expands_to_the_same_names_in_the_same_order(names):
    assert list(expand(compress(names))) == names


@settings(deadline=None)
@given(st.text(alphabet="ab019[],- \n", max_size=30))
def test_any_text_either_expands_and_comes_back_or_is_refused(text):
    try:
        names = expand(text)
    except ConfigError:
        return
    assert expand(compress(names)) == names


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 6))
def test_a_run_of_hosts_is_one_short_range(first, count, width):
    names = [f"n{number:0{width}d}" for number in range(first, first + count)]
    assert len(compress(names)) <= 3 + 2 * max(width, len(str(first + count))) + 1
    assert list(expand(compress(names))) == names
