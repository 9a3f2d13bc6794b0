"""The machines that belong to the project; what somebody has measured beside them is theirs, and no test reads it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_KEPT = re.findall(r"^!data/(.+)/$", (ROOT / ".gitignore").read_text(), re.M)
MACHINES = [name for name in _KEPT if (ROOT / "data" / name / "claims.csv").is_file()]
FIGURES = sorted(path for name in _KEPT for path in (ROOT / "figures" / name).glob("*.json"))
