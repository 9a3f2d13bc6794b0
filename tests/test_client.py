import asyncio
import socket

import pytest
from waiting_for_tests import until

from kvlab import answer, client, http1
from kvlab.client import Endpoint, clock, probe, send
from kvlab.errors import LoadError
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.http1 import Pool
from kvlab.records import REQUEST_COLUMNS
from kvlab.workload import Request

REQUEST = Request(3, list(range(100, 130)), 5, "unique")


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


def one(fake, request=REQUEST, *, behaviour=None, endpoint=None, times=1, session=None, zero=None, **arguments):
    """The last row of `times` requests, sent one after another through one session."""

    async def go():
        where, limits = endpoint or fake.endpoint, {"timeout_s": 60} | arguments
        async with Pool(**(session or {})) as opened:
            for _ in range(times):
                row = await send(opened, where, request, zero=zero, **limits)
        return row

    zero = clock() if zero is None else zero
    if behaviour is not None:
        fake.behaviour = behaviour
    return asyncio.run(go())


def test_a_success_fills_every_column_that_can_be_known(fake):
    row = one(fake)
    unknown = {name for name in REQUEST_COLUMNS if row[name] is None}
    assert unknown == {"prefix", "worker", "scheduled_s", "error"}
    assert row["ok"] and (row["request"], row["http_status"], row["finish_reason"]) == (3, 200, "length")
    assert (row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (30, 5, 0)
    assert row["event_tokens"] == [1] * 5 and len(row["event_times_s"]) == 5
    assert 0 <= row["start_s"] < row["first_content_s"] < row["last_content_s"] <= row["end_s"]
    assert row["ttft_s"] == pytest.approx(row["first_content_s"] - row["start_s"])
    assert row["latency_s"] == pytest.approx(row["last_content_s"] - row["start_s"])
    assert row["tpot_s"] == pytest.approx((row["last_content_s"] - row["first_content_s"]) / 4)


def test_the_request_pins_its_length_and_asks_for_what_is_verified(fake):  # pitfall 15
    one(fake)
    asked = fake.bodies[-1]
    assert asked["prompt"] == REQUEST.prompt  # pitfall 12
    assert asked["ignore_eos"] is True and asked["max_tokens"] == 5 and "min_tokens" not in asked
    assert asked["temperature"] == 0 and asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("lead", ["role", "empty"])
def test_ttft_waits_for_content(fake, lead):  # pitfall 1
    row = one(fake, behaviour=Behaviour(ttft_s=0.2, lead=lead))
    assert row["ok"] and row["ttft_s"] >= 0.2
    assert len(row["event_times_s"]) == 5


def test_tokens_per_event_are_kept(fake):  # pitfall 2
    row = one(fake, behaviour=Behaviour(tokens_per_event=2))
    assert row["ok"] and row["event_tokens"] == [2, 2, 1] and row["exact"]


def test_reasoning_counts_as_content(fake):  # pitfall 3
    row = one(fake, behaviour=Behaviour(reasoning=True, token_ids=False))
    assert row["ok"] and len(row["event_times_s"]) == 5


def test_the_stamp_is_taken_before_parsing(fake, monkeypatch):  # pitfall 4
    def parse(payload):
        parsed_at_s.append(clock() - zero)
        return real(payload)

    real, zero, parsed_at_s = answer.plain_tokens, clock(), []
    monkeypatch.setattr(answer, "plain_tokens", parse)
    row = one(fake, Request(0, REQUEST.prompt, 1), zero=zero)
    assert row["ok"] and row["first_content_s"] < parsed_at_s[0]


def test_latency_ends_with_the_last_content_not_with_the_usage_event(fake):  # pitfall 4
    row = one(fake, behaviour=Behaviour(tail_delay_s=1.0))
    assert row["ok"] and row["end_s"] - row["start_s"] >= 1.0
    assert row["latency_s"] < row["end_s"] - row["start_s"] - 0.5  # half of the delay: a slow reader may lose the rest


FAULTS = {
    "http_500": "HTTP 500: as told",
    "http_429": "HTTP 429: as told",
    "error_event": "error event after HTTP 200: the engine died",
    "truncated": "truncated stream",
    "malformed": "no JSON",
    "no_done": "without [DONE]",
    "no_finish": "without a finish_reason",
    "no_usage": "no usage",
    "abort": "'abort'",
    "short": "4 output tokens instead of 5",  # pitfall 15
    "wrong_prompt": "counted 31 prompt tokens, 30 were sent",  # pitfall 12
    "silent": "no event held content",
    "hang": "timeout after 2 s",  # pitfall 8
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_failure_is_a_row_with_its_reason_and_no_latency(fake, fault):  # pitfall 5
    row = one(fake, behaviour=Behaviour(fault=fault), timeout_s=2 if fault == "hang" else 60)
    assert row["ok"] is False and FAULTS[fault] in row["error"]
    assert row["ttft_s"] is row["latency_s"] is row["tpot_s"] is None
    assert row["http_status"] == (int(fault[5:]) if fault.startswith("http") else 200)
    assert row["start_s"] is not None and row["end_s"] >= row["start_s"]


def test_a_refused_connection_is_a_row_that_was_never_written():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = Endpoint(f"http://127.0.0.1:{free.getsockname()[1]}", "m")
    row = one(None, endpoint=nobody)
    assert not row["ok"] and row["error"].startswith("no connection")
    assert row["start_s"] is None and row["http_status"] is None and row["ttft_s"] is None


def test_a_connection_that_breaks_before_the_answer_is_a_row():
    async def go():
        async def slam(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()

        server = await asyncio.start_server(slam, "127.0.0.1", 0)
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
        async with server, Pool() as pool:
            return await send(pool, endpoint, REQUEST, zero=clock(), timeout_s=60)

    row = asyncio.run(go())
    assert not row["ok"] and "broke before an answer" in row["error"] and row["start_s"] is not None


def test_connecting_is_not_part_of_ttft(fake):  # pitfall 9
    endpoint = Endpoint(f"http://slow.test:{fake.port}", "fake")

    async def slow(host, port, **_):
        """Stands for anything slow between asking for a connection and having it."""
        await asyncio.sleep(0.3)
        return await resolve("127.0.0.1", port)

    async def go():
        nonlocal resolve
        resolve, asyncio.get_running_loop().getaddrinfo = asyncio.get_running_loop().getaddrinfo, slow
        async with Pool() as pool:
            return [await send(pool, endpoint, REQUEST, zero=clock(), timeout_s=60) for _ in range(2)]

    resolve = None
    cold, warm = asyncio.run(go())
    assert cold["ok"] and cold["connect_s"] >= 0.3 and cold["first_content_s"] - cold["ttft_s"] >= 0.3
    assert cold["wait_s"] + cold["connect_s"] <= cold["start_s"]  # each delay is counted once
    assert warm["ok"] and warm["connect_s"] == 0.0


def test_a_connection_for_each_request_where_asked(fake):
    row = one(fake, times=4, session={"reuse": False})
    assert row["ok"] and row["connect_s"] > 0 and len(fake.connections) == 4
    fake.connections.clear()
    one(fake, times=4)
    assert len(fake.connections) == 1


def test_the_pool_is_warm_before_the_first_request(fake, monkeypatch):  # pitfall 9
    monkeypatch.setattr(http1, "IDLE_REUSE_S", 60.0)

    async def go():
        async with Pool() as pool:
            assert await client.warm_pool(pool, fake.endpoint, 8) is True
            sent = (send(pool, fake.endpoint, REQUEST, zero=clock(), timeout_s=60) for _ in range(8))
            return await asyncio.gather(*sent)

    assert [row["connect_s"] for row in asyncio.run(go())] == [0.0] * 8


def test_the_schedule_delay_is_a_column_of_its_own(fake):
    row = one(fake, scheduled=clock() - 0.5)
    assert row["wait_s"] >= 0.5 and row["ttft_s"] == pytest.approx(row["first_content_s"] - row["start_s"])
    assert row["scheduled_s"] + row["wait_s"] + row["connect_s"] == pytest.approx(row["start_s"])


def test_a_defect_of_the_client_is_no_failure_of_the_server(fake, monkeypatch):
    monkeypatch.setattr(answer.Answer, "feed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one(fake)


def test_a_cancelled_request_leaves_a_row(fake, monkeypatch):
    def receive(connection, data, t):
        real(connection, data, t)
        seen.append(data)

    rows, seen, real = [], [], http1.Connection.take
    monkeypatch.setattr(http1.Connection, "take", receive)

    async def go():
        async with Pool() as pool:
            sent = send(pool, fake.endpoint, REQUEST, zero=clock(), timeout_s=60, record=rows.append)
            task = asyncio.create_task(sent)
            await asyncio.to_thread(until, lambda: b"data: " in b"".join(seen))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return task.cancelled()

    fake.behaviour = Behaviour(fault="hang")
    assert asyncio.run(go())
    assert [(r["ok"], r["error"], len(r["event_times_s"])) for r in rows] == [(False, "interrupted", 1)]


def probed(endpoint):
    async def go():
        async with Pool() as pool:
            return await probe(pool, endpoint, 1, 60.0)

    return asyncio.run(go())


def test_the_probe_leaves_out_what_the_server_refuses(fake):
    assert probed(fake.endpoint) == client.FULL
    fake.behaviour = Behaviour(refuses=("return_token_ids",))
    assert probed(fake.endpoint) == {"return_token_ids": False}


def test_the_probe_explains_a_server_that_cannot_be_measured(fake):
    fake.behaviour = Behaviour(refuses=("ignore_eos",))
    with pytest.raises(LoadError, match="ignore_eos"):
        probed(fake.endpoint)
    with pytest.raises(LoadError, match="Nothing answers"):
        probed(Endpoint("http://127.0.0.1:9", "m"))


def test_a_base_url_may_end_in_v1():
    for base in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert str(Endpoint(base, "m").url("/v1/completions")) == "http://h:1/v1/completions"


def test_the_key_is_sent():
    assert Endpoint("http://h", "m", api_key="k").headers == {"Authorization": "Bearer k"}
