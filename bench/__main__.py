"""``python -m bench refit | grids | plan | faults``: see ``--help`` of each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import faults, grid_cases, plan, refit
from bench.keep import keep


def main() -> None:
    """Runs one benchmark, prints its JSON and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    refit.add_arguments(commands.add_parser("refit", help=refit.__doc__))
    grid_cases.add_arguments(commands.add_parser("grids", help=grid_cases.__doc__))
    plan.add_arguments(commands.add_parser("plan", help=plan.__doc__))
    faults.add_arguments(commands.add_parser("faults", help=faults.__doc__))
    args = parser.parse_args()
    if args.command == "refit":
        result = refit.run(refit.parse(args))
    elif args.command == "grids":
        result = grid_cases.run(args)
    elif args.command == "plan":
        result = plan.run(args)
    else:
        result = faults.run(args.only)
    print(keep(Path(args.json) if args.json else None, result))
    if args.command == "refit" and args.plot:
        refit.plot(result, args.plot)
    problems = result.get("failed") or result.get("wrong")
    if problems:
        sys.exit(f"not a good run: {problems}")


if __name__ == "__main__":
    main()
