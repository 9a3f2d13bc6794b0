"""kube-proxy's rules: what they are, and in a network namespace of their own that they deal out evenly."""

import os
import shutil
import subprocess
import sys

import pytest

from kvlab import kube_rules
from kvlab.client import Endpoint
from kvlab.errors import ServerError

WORKERS = [Endpoint(f"http://127.0.0.1:{9000 + i}", "m", worker=f"w{i}") for i in range(3)]
INSIDE = """
import json, sys
from pathlib import Path
from kvlab import kube_rules, load, service
from kvlab.config import LoadConfig
from kvlab.fake_fleet import FakeFleet

LOAD = LoadConfig(workload="shared_prefix", new_connection=True, concurrency=4, requests=600, prefixes=2,
                  warmup_requests=2, prefix_tokens=64, input_tokens=80, output_tokens=1)
with FakeFleet(3) as fleet, kube_rules.KubeRules(fleet.endpoints, Path(".")) as rules:
    entrance = service.Service(fleet.endpoints, "kube_proxy", entrance=rules.endpoint)
    result = load.run_load(entrance, LOAD, nonce=3, progress=False)
    rules.check()
    table = service.by_worker(result.requests, result.samples)
    picks = rules.picks()
print(json.dumps({"ok": bool(result.requests["ok"].all()), "finished": table["requests_finished"].tolist(),
                  "picks": picks, "p": kube_rules.uniform(picks, 3), "version": rules.version}))
"""


def test_each_rule_takes_its_share_of_what_the_ones_before_left():
    made = kube_rules.rules(WORKERS)
    chances = [float(rule[rule.index("--probability") + 1]) for rule in made if "--probability" in rule]
    assert chances == [pytest.approx(1 / 3), pytest.approx(1 / 2)]  # and the last one takes the rest
    assert [rule[-1] for rule in made if "DNAT" in rule] == ["127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002"]


def test_the_rules_of_a_machines_own_network_stay(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: "/sbin/iptables")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth0": []})
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a rule was set"))
    with pytest.raises(ServerError, match="eth0.*stay as they are"):
        kube_rules.KubeRules(WORKERS, None).__enter__()


def test_who_may_not_is_told_why(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in kube_rules.why_not()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install iptables" in kube_rules.why_not()


def test_unequal_picks_are_found():
    assert kube_rules.uniform({"a": 200, "b": 205, "c": 195}, 3) > 0.5
    assert kube_rules.uniform({"a": 600}, 3) < 1e-6


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")
def test_the_kernels_service_deals_connections_out_evenly(tmp_path):  # pitfall 31
    import json

    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, INSIDE]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=tmp_path)
    if "unshare" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("this root may not make a network namespace")
    told = json.loads(done.stdout.splitlines()[-1]) if done.stdout else pytest.fail(done.stderr[-500:])
    assert told["ok"] and told["p"] > 1e-4
    assert sum(told["finished"]) == 602 and min(told["finished"]) > 140
    assert sum(told["picks"].values()) >= 602
