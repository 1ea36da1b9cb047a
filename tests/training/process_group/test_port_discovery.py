"""Where ranks look for each other, and what they say there; how they meet is in test_rendezvous."""

from slurmddp.host.ports import CANDIDATES, candidate_ports
from slurmddp.training.process_group.port_discovery import Words


def test_candidates_are_distinct_fixed_and_below_the_ephemeral_ports():
    ports = candidate_ports("100.0.0")
    assert ports == candidate_ports("100.0.0")
    assert len(set(ports)) == CANDIDATES
    assert all(15000 <= port < 30000 for port in ports)
    assert set(ports) != set(candidate_ports("100.0.1"))


def test_what_ranks_say_follows_from_launch_and_secret_and_does_not_tell_the_secret():
    words = Words("1.0.0", "5e" * 32)
    assert words.understand(words.answer(12345)) == 12345
    said = {words.question(), words.answer(12345)}
    for other in (Words("1.0.1", "5e" * 32), Words("1.0.0", "6e" * 32), Words("1.0.0", "")):
        assert not said & {other.question(), other.answer(12345)}
        assert other.understand(words.answer(12345)) is None
    assert not [text for text in said if b"5e5e" in text]
    assert "5e5e" not in repr(words)
