"""List the benchmarks, run one, or run `all`. Each prints a JSON line a claim; exit code 1 when a target is missed."""

from __future__ import annotations

import json
import sys

from benchmarks import startup, straggler

BENCHMARKS = {"startup": startup.run, "straggler": straggler.run}


def main(argv: list[str]) -> int:
    if not argv:
        for name, function in BENCHMARKS.items():
            print(f"{name}: {' '.join((function.__doc__ or '').split())}")
        return 0
    names = list(BENCHMARKS) if argv == ["all"] else argv
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    passed = True
    for name in names:
        for row in BENCHMARKS[name]():
            print(json.dumps(row), flush=True)
            passed = passed and row["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
