"""kvlab as one of the tools: python run_kvlab.py BASE_URL[,BASE_URL ...] STREAMS REQUESTS TOKENS OUT [PROCESSES]

Several servers get the requests in turn.
"""

import json
import sys

import numpy as np
from gaps import later_gaps_s

from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.load import run_load
from kvlab.rows import measured_rows
from kvlab.service import Service


def main() -> None:
    base_urls, streams, requests, tokens, out, *processes = sys.argv[1:]
    load = LoadConfig(
        concurrency=int(streams),
        requests=int(requests),
        input_tokens=64,
        output_tokens=int(tokens),
        processes=int(processes[0]) if processes else 1,
    )
    servers = [Endpoint(url, "kvlab-null", worker=f"server-{k}") for k, url in enumerate(base_urls.split(","))]
    result = run_load(Service(servers, "round_robin"), load, nonce=1, progress=False)
    rows = measured_rows(result.requests)
    ok = rows[rows["ok"]]
    ttft, itl = ok["ttft_s"].astype(float), later_gaps_s(ok)
    found = {"requests": len(rows), "failures": int((~rows["ok"]).sum()), "distinct": int(rows["request"].nunique())}
    for name, values in (("ttft", ttft), ("itl", itl)):
        found |= {f"{name}_p{q}_s": float(np.quantile(values, q / 100)) for q in (50, 99)}
    found["certificate"] = {k: v for k, v in result.certificate.items() if not isinstance(v, list)}
    found["rows_of_processes"] = result.certificate["rows_of_processes"]
    found["problems"] = result.certificate["problems"]
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
