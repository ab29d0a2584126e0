"""The plain face of the producer on a real file system, in one process: threads, errors, fencing."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import trio
from committed import committed
from finished import ran

from stepfs.errors import AbsentError, FencedError, UsageError
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer

SLICES = 2


def steps_of(url: str) -> list[tuple[str, bytes]]:
    """(producer id, first slice) of every step."""
    return [(name, slices[0]) for name, slices in committed(url)]


def batch(number: int) -> list[bytes]:
    return [b"%d" % number, b"other"]


def test_append_flush_and_resume(lake: str) -> None:
    with Producer(lake, producer_id="p") as producer:
        assert producer.position is None
        assert (producer.epoch, producer.lake.slices) == (1, SLICES)
        for number in range(5):
            assert producer.append(batch(number), position={"next": number + 1}) == number
        producer.flush()
        assert producer.committed_seq == producer.next_seq == 5
    with Producer(lake, producer_id="p") as producer:
        assert producer.position == {"next": 5}
        producer.append(batch(5), position={"next": 6})
    assert steps_of(lake) == [("p", b"%d" % number) for number in range(6)]


def test_an_exception_in_the_block_passes_through_unwrapped(lake: str) -> None:
    with pytest.raises(KeyError, match="mine"), Producer(lake, producer_id="p") as producer:
        producer.append(batch(0), position=1)
        raise KeyError("mine")
    with Producer(lake, producer_id="p") as producer:
        assert producer.position in {None, 1}


def test_errors_of_starting_surface_in_the_caller(file_url: str, lake: str) -> None:
    with pytest.raises(AbsentError, match="stepfs init"), Producer(f"{file_url}-no", producer_id="p"):
        pass
    with pytest.raises(UsageError, match="scheme"), Producer("ftp://x", producer_id="p"):
        pass
    producer = Producer(lake, producer_id="p")
    with pytest.raises(UsageError, match="not been started"):
        producer.append(batch(0), position=0)
    with producer:
        pass
    with pytest.raises(UsageError, match="closed"):
        producer.append(batch(0), position=0)
    with pytest.raises(UsageError, match="runs once"), producer:
        pass


def test_fenced_surfaces_in_append_or_flush(lake: str) -> None:
    with pytest.raises(FencedError), Producer(lake, producer_id="p") as old:
        with Producer(lake, producer_id="p") as new:
            new.append(batch(0), position=1)
        old.append(batch(0), position=1)
        old.flush()
    assert steps_of(lake) == [("p", b"0")]


def test_every_append_after_the_one_that_was_fenced_raises(lake: str) -> None:
    with pytest.raises(FencedError), Producer(lake, producer_id="p") as old:
        with Producer(lake, producer_id="p"):
            pass
        old.append(batch(0), position=1)  # taken: only its commit shows that there is a newer one
        with pytest.raises(FencedError):
            old.flush()
        for _ in range(2):
            with pytest.raises(FencedError):
                old.append(batch(1), position=2)
    assert steps_of(lake) == []


def test_no_thread_outlives_the_block(lake: str) -> None:
    before = threading.active_count()
    with Producer(lake, producer_id="p") as producer:
        producer.append(batch(0), position=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("stepfs-producer")]
    assert threading.active_count() <= before + 20  # trio keeps idle workers of its own for a moment


def test_several_threads_may_append(lake: str) -> None:
    with Producer(lake, producer_id="p", max_pending_bytes=1000) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.append(batch(7), position=None) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(steps_of(lake)) == 80


def test_producers_side_by_side_on_a_real_store(lake_url: str) -> None:
    """Four at once, each restarted once, on a directory and on a real S3 server."""
    trio.run(partial(create_lake, open_store(lake_url), slices=SLICES))

    def life(who: str, until: int) -> None:
        with Producer(lake_url, producer_id=who) as producer:
            start = producer.position
            for number in range(start if isinstance(start, int) else 0, until):
                producer.append(batch(number), position=number + 1)

    for until in (8, 15):
        threads = [threading.Thread(target=life, args=(f"p{name}", until)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = steps_of(lake_url)
    for name in range(4):
        assert [data for who, data in steps if who == f"p{name}"] == [b"%d" % number for number in range(15)]


def test_importing_the_producer_is_light() -> None:
    done = ran(
        [
            sys.executable,
            "-c",
            "import sys, stepfs_producer; print(*sorted({'torch','boto3','pyfuse3'} & set(sys.modules)))",
        ],
        check=True,
    )
    assert done.stdout.strip() == ""
