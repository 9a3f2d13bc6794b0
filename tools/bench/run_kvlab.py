"""kvlab as one of the tools: python run_kvlab.py BASE_URL STREAMS REQUESTS TOKENS OUT [PROCESSES]"""

import json
import sys

import numpy as np

from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.load import run_load
from kvlab.rows import itl_s, measured_rows


def main() -> None:
    base_url, streams, requests, tokens, out, *processes = sys.argv[1:]
    load = LoadConfig(
        concurrency=int(streams),
        requests=int(requests),
        input_tokens=64,
        output_tokens=int(tokens),
        processes=int(processes[0]) if processes else 1,
    )
    result = run_load(Endpoint(base_url, "kvlab-null"), load, nonce=1, progress=False)
    rows = measured_rows(result.requests)
    ok = rows[rows["ok"]]
    ttft, itl = ok["ttft_s"].astype(float), itl_s(ok)
    found = {"requests": len(rows), "failures": int((~rows["ok"]).sum())}
    for name, values in (("ttft", ttft), ("itl", itl)):
        found |= {f"{name}_p{q}_s": float(np.quantile(values, q / 100)) for q in (50, 99)}
    found["certificate"] = {k: v for k, v in result.certificate.items() if not isinstance(v, list)}
    found["problems"] = result.certificate["problems"]
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
