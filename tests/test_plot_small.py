"""The small pictures of the first screen: drawn from claims, and honest where there are none."""

import base64
import re

import pytest

from kvlab import claims, plot, plot_small, store

MACHINES = ["article", "h200", "mine"]


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    plot.use_style()
    monkeypatch.setattr(plot, "use_style", lambda: None)
    monkeypatch.setitem(plot_small.mpl.rcParams, "svg.fonttype", "none")  # words stay words


def words(key):
    svg = base64.b64decode(plot_small.draw(key, "mine", MACHINES)).decode()
    return [re.sub(r"<[^>]*>", "", text).strip() for text in re.findall(r"<text.*?</text>", svg, re.S)]


def state(machine, section, quantity, where, **values):
    old = [c for c in claims.from_frame(claims.read(store.machine_dir(machine))) if c.section == section]
    row = claims.claim(section, quantity, where, unit="s", **values)
    claims.write_section(store.machine_dir(machine), section, [*old, row])


@pytest.mark.parametrize("key", [key for key in plot_small.DRAWN])
def test_without_claims_a_picture_says_so(key):  # pitfall 6
    assert "not measured" in words(key)


def test_ratios_of_pairs_stand_between_their_ends():
    for kind, value in (("miss", 0.4), ("hit", 0.1)):
        state("h200", "prefix_cache", f"ttft_{kind}_s", {"prefix": 3000}, measured=value)
    shown = words("prefix")
    assert "4.0×" in shown and "h200" in shown and "mine" not in shown and {"miss", "hit"} <= set(shown)


def test_the_readers_own_machine_stands_beside_the_others():
    for machine in ("article", "mine"):
        state(machine, "load", "requests_that_fit_low", {"in": 512, "out": 128}, computed=10)
        for c, value in ((1, 10), (8, 60)):
            state(machine, "load", "throughput_tok_s", {"c": c, "in": 512, "out": 128}, measured=value)
        state(machine, "chunked_prefill", "itl_max_s", {"chunk": 2048, "in": 3500}, measured=0.2)
        state(machine, "service_hit_rate", "hit_ratio", {"prefixes": 7}, computed=0.5, measured=0.4)
    for key in ("load", "chunk", "service"):
        named = {word.split(",")[0] for word in words(key)}  # with the input's length where lengths differ
        assert {"article", "mine"} <= named, key


def test_gains_of_few_and_many_clients_stand_beside_what_was_foretold():
    for c, arms in ((1, (200, 100)), (32, (1200, 1000))):
        for arm, value in zip(("on", "off"), arms, strict=True):
            state("mine", "cuda_graphs", "throughput_tok_s", {"model": "tiny", "c": c, "compile": arm}, measured=value)
    assert {"1 client", "32 clients", "mine tiny"} <= set(words("graphs")) and "computed" not in words("graphs")
    state("mine", "cuda_graphs", "gain_throughput", {"model": "tiny", "c": 32}, computed=0.25, measured=0.2)
    assert "computed" in words("graphs")


def test_capacity_tells_computed_from_measured():
    state("mine", "kv_capacity", "capacity_tokens", {"server": "bf16", "block": 16}, computed=100, measured=110)
    assert {"mine bf16", "+10.0%"} <= set(words("capacity"))
