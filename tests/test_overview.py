"""What `kvlab check` counts without executing anything."""

from kvlab import claims, overview, store


def test_claims_that_wait_for_a_run_are_counted_by_section(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    waits = [
        "no run of this point is stored; measure it with: kvlab measure load",
        "no run is stored for this machine; x",
    ]
    made = [claims.claim("load", f"q{n}", unit="s", reason=reason) for n, reason in enumerate([*waits, "no GPU"])]
    made.append(claims.claim("load", "q", unit="s", measured=1.0))
    claims.write_section(store.machine_dir("mine"), "load", made)
    waiting = [claims.claim("startup", "q", unit="s", reason=waits[0])]
    claims.write_section(store.machine_dir("mine"), "startup", waiting)
    assert overview.without_run("mine") == {"load": 2, "startup": 1}
    assert overview.without_run("nobody") == {}
