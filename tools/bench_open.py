"""10,000 streams held open at once by kvlab, in several processes: `python tools/bench_open.py [STREAMS [PROCESSES]]`.

Each stream gets an event a second from the null server. Writes data/client/open.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from arguments import whole_above_zero
from bench_client import OUT
from null import NullServer
from peers import TOOLS, Ask
from watch import Watch

from kvlab.errors import KvlabError
from kvlab.files import check_writable, write_text

TTFT_S, ITL_S, TOKENS = 5.0, 1.0, 20


def main() -> None:
    """Measures, prints and writes; exits with 1 where a stream failed or fewer were open at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("streams", type=whole_above_zero, nargs="?", default=10_000)
    parser.add_argument("processes", type=whole_above_zero, nargs="?", default=4)
    options = parser.parse_args()
    try:
        check_writable(OUT.parent)
        found = measure(options.streams, options.processes)
    except KvlabError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted; nothing is written.")
    write_text(OUT.with_name("open.json"), json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(found["failures"] > 0 or found["open_at_once"] < options.streams)


def measure(streams: int, processes: int) -> dict[str, Any]:
    """What open.json says. Raises KvlabError where kvlab itself fails."""
    kvlab = TOOLS[0]
    with tempfile.TemporaryDirectory() as folder, NullServer(TTFT_S, ITL_S) as server:
        ask = Ask(server.port, streams, streams, TOKENS, Path(folder))
        process = subprocess.Popen([*kvlab.command(ask), str(processes)])
        watch = Watch(process.pid, every_s=1.0)
        try:
            status = process.wait()
        finally:
            process.kill()
            watch.stop()
        if status:
            raise KvlabError(f"kvlab ended with status {status}; its message stands above")
        result, stats = kvlab.read(ask), server.stats()
    return {
        "measured_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": kvlab.version,
        "cores": os.cpu_count(),
        "streams": streams,
        "processes": processes,
        "open_at_once": stats["open_max"],
        "requests": result["requests"],
        "failures": result["failures"],
        "events": stats["events"],
        "cpu_s": watch.cpu[-1],
        "rss_max_bytes": max(watch.rss),
        "ttft_added_p50_s": result["ttft_p50_s"] - TTFT_S,
        "ttft_added_p99_s": result["ttft_p99_s"] - TTFT_S,
    }


if __name__ == "__main__":
    main()
