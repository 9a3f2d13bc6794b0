import random

import pytest

from kvlab.sse import EventSplitter, data_of, is_error

STREAM = (
    ': ping\n\ndata: {"text":"é漢😀"}\n\ndata:{"a":1}\n\nid: 3\nevent: x\ndata: two\ndata: lines\n\ndata: [DONE]\n\n'
).encode()
PAYLOADS = ['{"text":"é漢😀"}'.encode(), b'{"a":1}', b"two\nlines", b"[DONE]"]


def payloads(pieces):
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return [data for event in events + splitter.flush() if (data := data_of(event)) is not None]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_in_two_anywhere_gives_the_same_events(ending):
    stream = STREAM.replace(b"\n", ending)
    for cut in range(len(stream) + 1):
        pieces = [piece for piece in (stream[:cut], stream[cut:]) if piece]
        assert payloads(pieces) == PAYLOADS, cut


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_single_bytes_and_random_pieces_give_the_same_events(ending):
    stream = STREAM.replace(b"\n", ending)
    assert payloads([stream[i : i + 1] for i in range(len(stream))]) == PAYLOADS
    rng = random.Random(1)
    for _ in range(100):
        cuts = sorted(rng.sample(range(1, len(stream)), 6))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert payloads(pieces) == PAYLOADS


def test_an_event_is_handed_out_with_the_read_that_completes_it():
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: b\n\ndata: c") == [b"data: a", b"data: b"]
    assert splitter.feed(b"\n\n") == [b"data: c"]


def test_crlf_events_do_not_wait_for_the_next_read():
    assert EventSplitter().feed(b"data: a\r\n\r\n") == [b"data: a"]


def test_an_event_of_a_megabyte_in_small_reads():
    big = b"data: " + b"x" * 2**20
    stream = big + b"\n\ndata: y\n\n"
    assert payloads([stream[i : i + 4096] for i in range(0, len(stream), 4096)]) == [big[6:], b"y"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_last_event_may_lack_its_blank_line(end):
    assert payloads([b"data: a\n\ndata: [DONE]" + end]) == [b"a", b"[DONE]"]


def test_blank_lines_and_comments_are_no_events():
    assert payloads([b"\n\n\n", b": keep-alive\n\n", b"\n\n", b"\ndata: a\n\n\n\n"]) == [b"a"]


def test_only_one_space_after_the_colon_is_dropped():
    assert data_of(b"data:  a") == b" a"
    assert data_of(b"data:a") == b"a"
    assert data_of(b"data") is None


def test_error_events_are_told_by_their_name():
    assert is_error(b'event: error\ndata: {"x":1}')
    assert not is_error(b'data: {"event": "error"}')
