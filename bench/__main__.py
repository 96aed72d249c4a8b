"""``python -m bench refit | plan``: see ``--help`` of each."""

from __future__ import annotations

import argparse
import json

from bench import refit


def main() -> None:
    """Runs one benchmark, prints its JSON and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    refit.add_arguments(commands.add_parser("refit", help=refit.__doc__))
    args = parser.parse_args()
    result = refit.run(refit.parse(args))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")
    if args.plot:
        refit.plot(result, args.plot)


if __name__ == "__main__":
    main()
