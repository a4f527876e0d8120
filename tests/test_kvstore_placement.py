"""Where keys live: by the numbers of the facts, and nothing lost or kept twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlab.kvstore.placement import BIG, place, server_of


@pytest.mark.parametrize(("key", "servers", "server"), [(3, 2, 1), (4, 2, 0), (5, 3, 5 * 9973 % 3), (99, 1, 0)])
def test_a_small_key_lives_on_one_server(key, servers, server):
    assert place(key, 10, servers) == [(key, server, 0, 10)]


def test_names_are_spread_and_live_where_they_lived():
    servers = [server_of(f"layer{number}.weight", 4) for number in range(100)]
    assert set(servers) == {0, 1, 2, 3}
    assert server_of("w", 4) == 2  # not Python's hash, which differs from process to process


def test_a_large_key_is_cut_with_halves_rounded_up():
    parts = place("w", 1211 * 1211, 2)
    assert [part.end - part.begin for part in parts] == [733261, 733260]
    assert [len(place(0, count, 2)) for count in (BIG - 1, BIG)] == [1, 2]
    assert len(place(0, BIG, 1)) == 1


@given(st.integers(0, 10**7), st.integers(1, 9))
def test_every_element_is_kept_once(count, servers):
    parts = place("w", count, servers, big=100)
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == count
    assert max(part.end - part.begin for part in parts) - min(part.end - part.begin for part in parts) <= 1
