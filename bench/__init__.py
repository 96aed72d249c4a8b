"""Benchmarks: refit, plan and the fault matrix; ``python -m bench --help``."""
