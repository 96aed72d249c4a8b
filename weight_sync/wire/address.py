"""Where an endpoint listens: a random name in a private directory, or TCP with CURVE keys."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref

import msgspec

from weight_sync import env
from weight_sync.errors import ConfigError

# sun_path holds 108 bytes with the terminating zero.
_PATH_LIMIT = 107


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A reachable endpoint.

    Attributes:
        url: ZMQ address, ``ipc://...`` or ``tcp://host:port``.
        server_key: CURVE public key (Z85) of the server; empty for ipc.
    """

    url: str
    server_key: str = ""


class PrivateDirectory:
    """A directory only this user can enter, removed with the object or the process."""

    def __init__(self) -> None:
        root = env.socket_root()
        try:
            self.path = tempfile.mkdtemp(prefix="ws-", dir=root)
        except OSError as error:
            raise ConfigError(
                f"cannot create a socket directory in {root or tempfile.gettempdir()}: {error}. "
                "Point WEIGHT_SYNC_SOCKET_DIR at a writable directory with a short path."
            ) from error
        os.chmod(self.path, 0o700)
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def socket_url(self) -> str:
        """A fresh ``ipc://`` address in the directory.

        Raises:
            ConfigError: If the path is longer than a Unix socket allows.
        """
        path = os.path.join(self.path, secrets.token_hex(8))
        if len(os.fsencode(path)) > _PATH_LIMIT:
            self.close()
            raise ConfigError(
                f"socket path {path} is longer than {_PATH_LIMIT} bytes; set "
                "WEIGHT_SYNC_SOCKET_DIR to a directory with a shorter path"
            )
        return f"ipc://{path}"

    def close(self) -> None:
        """Removes the directory; safe twice."""
        self._finalizer()
