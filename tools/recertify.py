"""Judges stored runs of a machine anew by today's audit of the prefix cache, from their own tables.

    python tools/recertify.py h200

Only runs that were refused for hits that nobody shares, and whose requests were looked up again while they waited, can
change. Nothing measured is touched; the manifest says that it was judged again.
"""

import json
import sys

from kvlab import certificate, store
from kvlab.certificate import Evidence
from kvlab.config import LoadConfig, build

REFUSAL = "The prefix cache served"


def judge(run: store.Run) -> bool:
    """Whether the run is valid now and was not before."""
    problems = run.manifest["problems"]
    if not problems or not all(text.startswith(REFUSAL) for text in problems):
        return False
    load = build(LoadConfig, run.manifest["cell"]["load"], run.id)
    evidence = Evidence(load, run.requests(), run.samples(), None)
    failures: list[str] = []
    told = certificate._accounts(evidence, failures, [])
    if failures:
        return False
    old = run.manifest["certificate"]
    kept = [text for text in old["problems"] if not text.startswith(REFUSAL)]
    note = "judged again: the counters count lookups, and the answers tell the hits"
    new = old | {"failures": [], "problems": kept, "judged_again": note}
    new |= {"unexplained_prefix_hits": told["unexplained_prefix_hits"]}
    manifest = run.manifest | {"certificate": new, "problems": [], "valid": True}
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    store.write_text(run.path / store.MANIFEST, text + "\n")
    return True


if __name__ == "__main__":
    for machine in sys.argv[1:]:
        for found in store.list_runs(machine):
            if not found.valid and judge(found):
                print(f"{machine}: {found.id} is valid")
