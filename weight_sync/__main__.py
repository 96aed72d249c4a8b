"""``python -m weight_sync doctor`` says what of this library works on this machine."""

from __future__ import annotations

import argparse
import sys

from weight_sync.doctor import findings, report


def main() -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m weight_sync")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check this machine: ok, warn or fail per line")
    parser.parse_args()
    return report(findings())


if __name__ == "__main__":
    sys.exit(main())
