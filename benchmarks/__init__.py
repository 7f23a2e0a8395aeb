"""Timed claims, each runnable by one command: `python -m benchmarks` lists them, `python -m benchmarks NAME` runs one
and prints JSON lines."""
