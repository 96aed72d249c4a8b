"""``python -m bench refit | plan | faults``: see ``--help`` of each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench import faults, plan, refit


def main() -> None:
    """Runs one benchmark, prints its JSON and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    refit.add_arguments(commands.add_parser("refit", help=refit.__doc__))
    plan.add_arguments(commands.add_parser("plan", help=plan.__doc__))
    faults.add_arguments(commands.add_parser("faults", help=faults.__doc__))
    args = parser.parse_args()
    if args.command == "refit":
        result = refit.run(refit.parse(args))
    elif args.command == "plan":
        result = plan.run(args)
    else:
        result = faults.run(args.only)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(text + "\n")
    if args.command == "refit" and args.plot:
        refit.plot(result, args.plot)


if __name__ == "__main__":
    main()
