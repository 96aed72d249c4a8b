"""Checks that relative links in README.md and docs/*.md name files and headings that exist.

Links to other sites are left alone: the check must give the same answer without a network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown page's headings get: lower case, punctuation off, dashes."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken(page: Path) -> list[str]:
    """The links of one page that lead nowhere, each with the page's name in front."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        missing = not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
        )
        if missing:
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def main() -> int:
    """Prints the broken links; returns the exit status."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [link for page in pages for link in broken(page)]
    for link in found:
        print(f"broken link in {link}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
