"""The bearer check of every HTTP route."""

from __future__ import annotations

import hmac


def bearer_matches(header: str | None, api_key: str) -> bool:
    """Tells whether an ``Authorization`` header carries ``api_key``, in constant time.

    The comparison takes as long for a wrong first character as for a wrong last one, so that the
    key cannot be guessed piece by piece.
    """
    scheme, _, token = (header or "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    same = hmac.compare_digest(given, api_key.encode("utf-8"))
    return same and scheme.lower() == "bearer"
