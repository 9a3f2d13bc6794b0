import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter

import pandas as pd
import psutil
import pytest
from waiting_for_tests import until

from kvlab import answer, http1
from kvlab.certificate import Evidence, certify, plateau
from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.driver import SERVER_GONE
from kvlab.errors import ConfigError, LoadError
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.load import PROGRESS_AFTER_S, request_frame, run_load, run_load_async
from kvlab.records import REQUEST_COLUMNS, SAMPLE_COLUMNS
from kvlab.scrape import counter_delta, sample_frame
from kvlab.workload import Request, plan


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


def load(**changes):
    return LoadConfig(**({"concurrency": 4, "requests": 20, "input_tokens": 32, "output_tokens": 5} | changes))


def run(fake, *, behaviour=None, explicit=None, **changes):
    fake.behaviour = behaviour or fake.behaviour
    return run_load(fake.endpoint, load(**changes), nonce=7, requests=explicit, progress=False)


def in_flight(rows: pd.DataFrame, end: str = "end_s") -> int:
    """Most requests under way at once, by the rows."""
    starts = [(t, 1) for t in rows["start_s"].dropna()]
    ends = [(t, -1) for t in rows.loc[rows["start_s"].notna(), end]]
    level = most = 0
    for _, step in sorted(starts + ends):
        level += step
        most = max(most, level)
    return most


def test_a_closed_loop_from_end_to_end(fake):
    result = run(fake, warmup_requests=4)
    assert list(result.requests.columns) == list(REQUEST_COLUMNS)
    assert list(result.samples.columns) == list(SAMPLE_COLUMNS)
    assert result.requests["phase"].tolist() == ["warmup"] * 4 + ["measure"] * 20
    assert result.requests["request"].tolist() == [*range(4), *range(20)]
    assert result.requests["ok"].all() and not result.interrupted
    certificate = json.loads(json.dumps(result.certificate))
    assert certificate["failures"] == [] and certificate["fake"] is True
    assert certificate["output_tokens_rows"] == certificate["output_tokens_counter"] == 24 * 5
    assert certificate["prompt_tokens_rows"] == certificate["prompt_tokens_counter"] == 24 * 32
    assert certificate["tokens_per_event"] == "exact" and certificate["client_cpu_s"] > 0
    assert certificate["loop_lag_p50_s"] <= certificate["loop_lag_p99_s"] <= certificate["loop_lag_max_s"]  # pitfall 10


def test_exactly_the_asked_number_is_in_flight(fake):  # pitfall 7, pitfall 11
    result = run(fake, behaviour=Behaviour(ttft_s=0.4, together=150), concurrency=150, requests=300)
    assert fake.most_running == 150
    assert in_flight(result.requests) == 150
    assert result.certificate["target_concurrency"] == 150
    assert abs(result.certificate["littles_law_residual"]) < 0.3


def test_warm_up_is_drained_before_the_measured_phase(fake):  # pitfall 18
    rows = run(fake, warmup_requests=6).requests
    warm, measured = rows[rows["phase"] == "warmup"], rows[rows["phase"] == "measure"]
    assert warm["end_s"].max() < measured["start_s"].min()


def test_the_samples_frame_the_whole_load(fake):  # pitfall 23
    result = run(fake, behaviour=Behaviour(itl_s=0.05), warmup_requests=4, sample_interval_s=0.1)
    rows, samples = result.requests, result.samples
    assert samples["t_s"].iloc[0] < rows["start_s"].min() and samples["t_s"].iloc[-1] > rows["end_s"].max()
    assert counter_delta(samples, "requests_finished") == 24
    assert samples["running"].max() == 4
    between = samples[samples["t_s"].between(*rows.groupby("phase")[["end_s"]].min()["end_s"].sort_values())]
    assert len(between) > 0


def test_failures_stand_beside_the_successes(fake):  # pitfall 5, pitfall 6
    rows = run(fake, behaviour=Behaviour(fault="http_429", fault_every=4)).requests
    failed = rows[~rows["ok"]]
    assert len(rows) == 20 and 4 <= len(failed) <= 6
    assert failed[["ttft_s", "latency_s", "tpot_s", "output_tokens"]].isna().all().all()
    assert failed["error"].str.contains("HTTP 429").all() and (failed["http_status"] == 429).all()
    assert rows.loc[rows["ok"], "error"].isna().all()


def test_a_slow_request_is_a_failure_at_its_time_limit(fake):  # pitfall 8
    rows = run(fake, behaviour=Behaviour(fault="hang", fault_every=3), timeout_s=2, requests=8).requests
    failed = rows[~rows["ok"]]
    assert len(rows) == 8 and len(failed) >= 2 and failed["error"].str.startswith("timeout").all()


def test_a_dying_server_ends_the_run_soon(fake):  # pitfall 6
    result = run(fake, behaviour=Behaviour(die_after=20), requests=400)
    rows = result.requests
    assert len(rows) == 400 and rows["ok"].sum() <= 20
    assert (rows["error"] == SERVER_GONE).sum() > 300
    assert rows.loc[rows["error"] == SERVER_GONE, "start_s"].isna().all()
    assert any("went away" in failure for failure in result.certificate["failures"])


def test_nothing_listening_is_an_error_and_not_a_thousand_rows():
    with pytest.raises(LoadError, match="Nothing answers"):
        run_load(Endpoint("http://127.0.0.1:9", "m"), load(), nonce=1, progress=False)


def test_a_poisson_load_starts_at_its_times(fake):
    result = run(fake, arrival="poisson", rate_per_s=100.0, requests=40)
    rows = result.requests
    offsets = rows["scheduled_s"] - rows["scheduled_s"].iloc[0]
    planned = [r.at_s for r in plan(load(arrival="poisson", rate_per_s=100.0, requests=40), (100, 4000), 7)[1]]
    assert offsets.tolist() == pytest.approx([t - planned[0] for t in planned], abs=1e-6)
    lag_s = result.certificate["loop_lag_max_s"]  # of this machine in this moment: no request is later than the loop
    assert (rows["wait_s"] >= 0).all() and rows["wait_s"].median() < lag_s + 0.05
    assert (rows["start_s"] - rows["scheduled_s"] - rows["wait_s"] - rows["connect_s"]).abs().max() < 1e-6
    assert result.window is None and result.certificate["target_concurrency"] is None
    assert result.certificate["schedule_delay_p99_s"] == pytest.approx(rows["wait_s"].quantile(0.99))


def test_an_open_loop_does_not_wait_for_answers(fake):  # pitfall 6
    config = {"arrival": "constant", "rate_per_s": 100.0, "requests": 30, "timeout_s": 60}
    rows = run(fake, behaviour=Behaviour(together=30), **config).requests  # nobody is answered before all are there
    assert rows["ok"].all() and in_flight(rows) == 30


def test_an_explicit_plan_is_sent_as_given(fake):
    decode = Request(0, list(range(100, 132)), 100, "decode", at_s=0.0)
    inserts = [Request(i, list(range(200 + i, 500 + i)), 2, "insert", at_s=0.1 * i) for i in (1, 2, 3)]
    fake.behaviour = Behaviour(itl_s=0.02)
    rows = run(fake, explicit=[decode, *inserts]).requests
    assert rows["kind"].tolist() == ["decode"] + ["insert"] * 3 and rows["ok"].all()
    planned = rows["scheduled_s"] - rows["scheduled_s"].iloc[0]
    assert planned.tolist() == pytest.approx([0, 0.1, 0.2, 0.3]) and (rows["start_s"] >= rows["scheduled_s"]).all()
    assert rows["output_tokens"].tolist() == [100, 2, 2, 2] and rows["end_s"].iloc[0] > rows["end_s"].iloc[3]
    with pytest.raises(ConfigError):
        run(fake, explicit=[])


def test_shared_prefixes_and_hits_that_they_explain(fake):
    shared = {"workload": "shared_prefix", "prefix_tokens": 16, "prefixes": 2, "warmup_requests": 2}
    result = run(fake, behaviour=Behaviour(cached_tokens=14), **shared)
    assert set(result.requests["kind"][2:]) == {"prefix_again"}
    assert result.certificate["unexplained_prefix_hits"] == 0 and result.certificate["failures"] == []
    assert result.certificate["cached_tokens_rows"] == result.certificate["prefix_hits_counter"] == 22 * 14
    fake.behaviour = Behaviour(cached_tokens=30)
    assert run(fake, **shared).certificate["unexplained_prefix_hits"] == 22 * 30 - 20 * 16


class LookedUpThrice(Counter):
    """Counters of a server whose requests wait for blocks: each attempt to schedule one is a lookup."""

    def update(self, *none, **grown):
        super().update(*none, **(grown | {name: 3 * grown[name] for name in ("queries", "hits") if name in grown}))


def test_lookups_that_were_counted_again_are_no_hits_of_others(fake):
    shared = {"workload": "shared_prefix", "prefix_tokens": 16, "prefixes": 2, "warmup_requests": 2}
    fake.counts = LookedUpThrice()
    result = run(fake, behaviour=Behaviour(cached_tokens=16), **shared)
    assert result.certificate["prefix_hits_counter"] == 3 * 22 * 16
    assert (
        result.certificate["unexplained_prefix_hits"] == 22 * 16 - 20 * 16
    )  # what the answers tell, not thrice as much
    fake.behaviour = Behaviour(cached_tokens=14)
    assert run(fake, **shared).certificate["failures"] == []


def test_an_unexplained_hit_fails_the_run(fake):  # pitfall 13
    result = run(fake, behaviour=Behaviour(cached_tokens=16))
    assert result.certificate["unexplained_prefix_hits"] == 20 * 16
    assert any("prefix cache served" in failure for failure in result.certificate["failures"])


def test_what_others_send_meanwhile_shows(fake):
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.01):
            fake.counts["generated"] += 3

    thread = threading.Thread(target=disturb)
    thread.start()
    result = run(fake)
    stop.set()
    thread.join()
    assert any("output tokens, the server counted" in problem for problem in result.certificate["problems"])


def test_servers_without_vllm_metrics_are_measured_and_say_so(fake):  # pitfall 22
    result = run(fake, behaviour=Behaviour(metrics_text="up 1\n"))
    assert result.requests["ok"].all() and result.samples.empty
    assert result.certificate["prefix_hits_counter"] is None and result.certificate["unexplained_prefix_hits"] is None
    assert any("up" in problem for problem in result.certificate["problems"])


def test_endpoints_that_do_not_count_tokens_are_marked(fake):  # pitfall 2
    result = run(fake, behaviour=Behaviour(token_ids=False, tokens_per_event=2))
    assert result.requests["ok"].all() and result.certificate["tokens_per_event"] == "spread"
    assert result.requests["event_tokens"].map(sum).eq(5).all()


def test_several_processes_share_the_load(fake):
    result = run(fake, behaviour=Behaviour(ttft_s=0.2), processes=2, concurrency=5, requests=31, warmup_requests=5)
    rows = result.requests
    assert len(rows) == 36 and rows["ok"].all()
    assert rows["request"].tolist() == [*range(5), *range(31)]
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 37  # each once, and the probe
    measured = rows[rows["phase"] == "measure"]
    assert in_flight(measured, "last_content_s") == 5 and fake.most_running == 5
    assert result.certificate["output_tokens_rows"] == result.certificate["output_tokens_counter"]
    with pytest.raises(ConfigError, match="processes"):
        run(fake, processes=5)


def test_a_connection_for_each_request(fake, monkeypatch):
    monkeypatch.setattr(http1, "IDLE_REUSE_S", 60.0)
    rows = run(fake, new_connection=True).requests
    assert (rows["connect_s"] > 0).all() and len(fake.connections) == 21
    fake.connections.clear()
    rows = run(fake).requests
    assert (rows["connect_s"] == 0).all() and len(fake.connections) <= 5  # pitfall 9


def test_both_entries_work_inside_a_running_loop(fake):  # pitfall 36
    async def notebook():
        inner = run_load(fake.endpoint, load(), nonce=1, progress=False)
        awaited = await run_load_async(fake.endpoint, load(), nonce=2, progress=False)
        return inner, awaited

    assert all(result.requests["ok"].all() for result in asyncio.run(notebook()))


def ctrl_c_when(condition):
    """Presses it, from another thread, as soon as the condition holds."""

    def press():
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_ctrl_c_returns_what_was_measured(fake):
    fake.behaviour = Behaviour(fault="hang", fault_every=7)
    ctrl_c_when(lambda: len(fake.bodies) >= 4 * 7)  # then each client waits for one that hangs
    result = run(fake, requests=200)
    assert result.interrupted and result.certificate["interrupted"]
    rows = result.requests
    assert rows["ok"].sum() > 5 and (rows["error"] == "interrupted").sum() == 4
    until_ended("kvlab-load")


def test_ctrl_c_ends_all_processes(fake):
    fake.behaviour = Behaviour(fault="hang", fault_every=2)
    before = set(psutil.Process().children())  # multiprocessing keeps a resource tracker for the whole test run
    ctrl_c_when(lambda: len(fake.bodies) >= 4 * 2 and len(set(psutil.Process().children()) - before) >= 2)
    result = run(fake, processes=2)
    assert result.interrupted
    until(lambda: set(psutil.Process().children()) <= before)


def until_ended(name):
    """Waits until every thread of this name is over."""
    until(lambda: not any(thread.name == name for thread in threading.enumerate()))


def test_cancelling_the_async_entry_stops_the_load(fake):
    async def go():
        task = asyncio.create_task(run_load_async(fake.endpoint, load(), nonce=1, progress=False))
        await asyncio.to_thread(until, lambda: fake.counts["running"])
        task.cancel()
        await task

    fake.behaviour = Behaviour(fault="hang")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    until_ended("kvlab-load")


def test_a_defect_of_the_client_raises(fake, monkeypatch):
    run(fake)
    monkeypatch.setattr(answer.Answer, "why_not", lambda *_: 1 / 0)
    with pytest.raises(LoadError, match="ZeroDivisionError"):
        run(fake)


def test_a_client_that_cannot_keep_up_is_marked_late(fake, monkeypatch):  # pitfall 10
    def slow(*arguments):
        time.sleep(0.02)
        return real(*arguments)

    real = answer.Answer.feed
    monkeypatch.setattr(answer.Answer, "feed", slow)
    certificate = run(fake).certificate
    assert certificate["late"] and certificate["loop_lag_p99_s"] > 0.01
    assert any("late" in problem for problem in certificate["problems"])


def test_the_bar_appears_only_where_it_takes_long(fake, capsys, monkeypatch):
    assert PROGRESS_AFTER_S == 2
    monkeypatch.setattr("kvlab.load.PROGRESS_AFTER_S", 60)
    run_load(fake.endpoint, load(), nonce=1)
    assert "req" not in capsys.readouterr().err
    monkeypatch.setattr("kvlab.load.PROGRESS_AFTER_S", 0.5)
    fake.behaviour = Behaviour(ttft_s=0.3)
    run_load(fake.endpoint, load(requests=16), nonce=1)
    assert "req" in capsys.readouterr().err


# -- the certificate and the plateau, by hand -----------------------------------------------------------------------


def rows_of(spans, **more):
    return [
        {"request": i, "phase": "measure", "start_s": start, "last_content_s": end, "end_s": end + 0.1, "ok": True}
        | {"process": 0, "prompt_tokens": 10, "output_tokens": 5, "ttft_s": 0.1, "wait_s": 0.0}
        | more
        for i, (start, end) in enumerate(spans)
    ]


def evidence(spans=((0, 2), (1, 4), (2, 5), (4, 7)), samples=(), **more):
    made = Evidence(load(concurrency=2, requests=4), request_frame(rows_of(spans)), sample_frame(samples), (1.0, 5.0))
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_the_plateau_leaves_out_ramp_and_drain():  # pitfall 17
    assert plateau(rows_of([(0, 2), (1, 4), (2, 5), (4, 7)]), 2) == (1, 5)


def test_the_plateau_ends_at_a_last_content_not_at_a_usage_event():  # pitfall 4
    assert plateau(rows_of([(0, 2), (1, 4), (2, 5), (4, 7)], end_s=99.0), 2)[1] == 5


def test_there_is_no_plateau_without_two_rounds():  # pitfall 17
    assert plateau(rows_of([(0, 2), (1, 4), (2, 5)]), 2) is None
    assert plateau([], 1) is None


def test_a_failed_request_ends_the_plateau_when_it_ended():
    rows = rows_of([(0, 2), (1, 4), (2, 5), (4, 7)])
    rows[2] |= {"ok": False, "last_content_s": None, "end_s": 4.5}
    assert plateau(rows, 2) == (1, 4.5)


def test_the_plateau_of_several_processes_holds_in_each():
    rows = rows_of([(0, 2), (2, 4), (4, 6)]) + rows_of([(1, 3), (3, 5)], process=1)
    assert plateau(rows, 2) == (1, 5)


def test_delivered_concurrency_is_checked_by_littles_law():  # pitfall 11
    good = certify(evidence())
    assert good["littles_law_residual"] == pytest.approx(0) and good["problems"] == []
    bad = certify(evidence([(0, 2), (1, 2), (2.5, 4), (4, 7)]))
    assert bad["littles_law_residual"] < -0.3
    assert any("were delivered" in problem for problem in bad["problems"])


def test_the_running_gauge_is_compared_with_the_target():  # pitfall 7
    def gauge(running, waiting):
        return [{"t_s": 1.0 + i, "running": running, "waiting": waiting} for i in range(5)]

    assert any("never saw more than 1" in p for p in certify(evidence(samples=gauge(1.0, 0.0)))["problems"])
    assert certify(evidence(samples=gauge(1.0, 1.0)))["problems"] == []
    assert certify(evidence(samples=gauge(1.0, 1.0)))["running_max"] == 1


def test_the_running_gauges_of_several_workers_are_added_scrape_by_scrape():
    def gauges(*running):
        """Five scrapes of two workers; the second answers later."""
        found = [
            (1.0 + i + k / 10, f"w{k}", value) for i in range(5) for k, value in enumerate(running[i % len(running)])
        ]
        return [{"t_s": t, "worker": worker, "running": value, "waiting": 0.0} for t, worker, value in found]

    both = certify(evidence(samples=gauges((1.0, 1.0))))
    assert both["problems"] == [] and both["running_max"] == 2
    one = certify(evidence(samples=gauges((1.0, 0.0), (0.0, 1.0))))  # it moves between the workers
    assert any("never saw more than 1 of 2" in p for p in one["problems"]) and one["running_max"] == 1
    few = certify(evidence(samples=gauges((1.0, 0.0))[:6]))  # six rows, but three scrapes
    assert few["problems"] == [] and few["running_max"] == 1


def test_a_gauge_says_nothing_of_requests_that_end_between_two_scrapes():
    short = [(i, i + 0.1) for i in range(6)]
    idle = [{"t_s": i + 0.5, "running": 0.0, "waiting": 0.0} for i in range(5)]
    assert not any("never saw" in p for p in certify(evidence(short, samples=idle))["problems"])


def test_a_restarted_server_fails_the_run():
    samples = [{"t_s": float(t), "prefix_hits": hits} for t, hits in enumerate([5.0, 1.0, 9.0])]
    certificate = certify(evidence(samples=samples))
    assert any("fell" in failure for failure in certificate["failures"])
    assert certificate["prefix_hits_counter"] is None


def test_a_ttft_much_longer_than_the_servers_own_is_named():
    def histogram(total):
        return [{"t_s": t, "ttft_sum_s": t * total, "ttft_count": t * 4} for t in (0.0, 1.0)]

    assert certify(evidence(samples=histogram(0.39)))["problems"] == []
    slow = certify(evidence(samples=histogram(0.04)))
    assert slow["ttft_client_minus_server_s"] == pytest.approx(0.09)
    assert any("longer than the server's own" in problem for problem in slow["problems"])


def test_lateness_has_a_limit():  # pitfall 10
    assert certify(evidence(lags_s=[0.001] * 100))["late"] is False
    assert certify(evidence(lags_s=[0.001] * 90 + [0.05] * 10))["late"] is True
    assert certify(evidence(cpu_s=[(9.5, 10.0)]))["client_cpu_share"] == 0.95
