"""How long `import paceline` takes, in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

REPETITIONS = 9
TARGET_S = 0.3


def seconds(code: str) -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began_s


def run() -> Iterator[dict[str, Any]]:
    """`import paceline` against a bare interpreter, in turn."""
    seconds("import paceline")
    pairs = [(seconds("import paceline"), seconds("pass")) for _ in range(REPETITIONS)]
    took = statistics.median(ours - bare for ours, bare in pairs)
    yield {
        "name": "import paceline, seconds",
        "ratio": round(took / TARGET_S, 3),
        "target": 1.0,
        "passed": took < TARGET_S,
        "medians": {"paceline": round(took, 4), "bare interpreter": round(statistics.median(b for _, b in pairs), 4)},
        "spread": [round(min(o - b for o, b in pairs), 4), round(max(o - b for o, b in pairs), 4)],
        "repetitions": REPETITIONS,
    }
