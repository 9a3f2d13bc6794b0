"""Does the load generator grow? Resident memory against events at full rate: `python tools/bench_memory.py MINUTES`.

256 streams of 50 events/s from the null server. Writes data/client/memory.csv (t_s, events, rss_bytes) and memory.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import numpy as np
import pandas as pd
from bench_client import OUT, SCENARIOS
from null import NullServer
from peers import TOOLS, Ask
from watch import tree

from kvlab.files import write_text

EVERY_S = 5.0
SETTLED = 0.1  # share of the run that is left out: first allocations are no growth


def main() -> None:
    """Measures, prints and writes."""
    minutes, s, kvlab = float(sys.argv[1]), SCENARIOS["paced"], TOOLS[0]
    rounds = max(2, round(60 * minutes / (s.ttft_s + s.tokens * s.itl_s)))
    began, rows = datetime.now(UTC).isoformat(timespec="seconds"), []
    with tempfile.TemporaryDirectory() as folder, NullServer(s.ttft_s, s.itl_s) as server:
        ask = Ask(server.port, s.streams, s.streams * rounds, s.tokens, Path(folder))
        process = subprocess.Popen(kvlab.command(ask))
        while process.poll() is None:
            time.sleep(EVERY_S)
            events, rss = server.stats()["events"], tree(process.pid)[1]
            if 0 < events < ask.requests * ask.tokens and rss:
                rows.append({"t_s": time.monotonic(), "events": events, "rss_bytes": rss})
        result = kvlab.read(ask)
    frame = pd.DataFrame(rows)
    frame["t_s"] -= frame["t_s"].iloc[0]
    settled = frame[frame["t_s"] > SETTLED * frame["t_s"].iloc[-1]]
    slope, at_start = np.polyfit(settled["events"], settled["rss_bytes"], 1)
    found = {
        "measured_utc": began,
        "version": kvlab.version,
        "minutes": float(frame["t_s"].iloc[-1] / 60),
        "events": int(frame["events"].iloc[-1]),
        "requests": result["requests"],
        "failures": result["failures"],
        "rss_start_bytes": float(at_start),
        "rss_end_bytes": int(settled["rss_bytes"].iloc[-1]),
        "slope_bytes_per_event": float(slope),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_text(OUT.with_name("memory.csv"), frame.to_csv(index=False, float_format="%.1f"))
    write_text(OUT.with_name("memory.json"), json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
