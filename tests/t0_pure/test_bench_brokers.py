"""What `bench_ingest --peers` counts with: payloads that show damage, messages put together again, what a kill took."""

from __future__ import annotations

import random
import sys

import pytest

from bench_ingest.brokers.payloads import PIECE_HEAD_BYTES, Assembly, number_of, payload, pieces
from bench_ingest.brokers.sides import Losses, read_until_killed


def test_a_payload_says_its_number_and_shows_damage_and_loss():
    body = payload(7, 100)
    assert len(body) == 100
    assert number_of(body) == 7
    assert number_of(body[:50] + b"\0" + body[51:]) is None
    assert number_of(body[:-1]) is None
    assert number_of(b"") is None
    assert payload(8, 100) != body


@pytest.mark.parametrize(("size", "count"), [(12, 1), (984, 1), (985, 2), (1968, 2), (1969, 3)])
def test_a_payload_above_the_bound_of_a_message_travels_as_several(size, count):
    found = list(pieces(3, payload(3, size), 1000))
    assert len(found) == count
    assert all(PIECE_HEAD_BYTES < len(message) <= 1000 for message in found)


def test_payloads_are_put_together_whatever_order_their_messages_come_in():
    messages = [message for number in range(5) for message in pieces(number, payload(number, 2500), 1000)]
    random.Random(1).shuffle(messages)
    assembly = Assembly()
    whole = [body for body in map(assembly.add, messages) if body is not None]
    assert {number_of(body) for body in whole} == {0, 1, 2, 3, 4}
    assert len(whole) == 5


def test_a_payload_of_which_a_message_is_missing_is_none():
    first, *_ = pieces(0, payload(0, 2500), 1000)
    assert Assembly().add(first) is None


def test_lost_is_what_was_acknowledged_and_is_not_there_not_what_was_under_way():
    assert str(Losses.of([0, 1, 2], [0, 2, 3])) == "1 of 3"
    assert str(Losses.of([0, 1], [0, 1, 2])) == "0 of 2"


PUBLISHER = "import itertools\nfor n in itertools.count(): print(n, flush=True)"


def test_what_was_acknowledged_before_and_while_the_server_died_counts():
    killed = []
    found = read_until_killed([sys.executable, "-c", PUBLISHER], 5, lambda: killed.append(True))
    assert killed == [True]
    assert found == list(range(len(found)))
    assert len(found) >= 5


def test_a_publisher_that_ends_by_itself_is_no_measurement():
    with pytest.raises(RuntimeError, match="ended after 1"):
        read_until_killed([sys.executable, "-c", "print(0)"], 5, lambda: None)
