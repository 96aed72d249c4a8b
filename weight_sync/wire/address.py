"""Where an endpoint listens: a random name in a private directory, or TCP with CURVE keys."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

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


def host_towards(address: Address) -> str | None:
    """This machine's address on the way to a peer, for peers that must answer back.

    Returns:
        None if the peer listens on this machine only.
    """
    if not address.url.startswith("tcp://"):
        return None
    host, _, port = address.url.removeprefix("tcp://").rpartition(":")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses a route.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])


def _prefix(pid: int) -> str:
    """How directories of a process begin, never again used by another: ``ws-NAMESPACE-PID-START-``.

    Raises:
        OSError: If there is no such process.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    stat = Path(f"/proc/{pid}/stat").read_text()
    # The name of the program, in brackets, may hold blanks; the start time is field 22.
    start = int(stat.rpartition(")")[2].split()[19])
    return f"ws-{namespace:x}-{pid:x}-{start:x}-"


def sweep(root: str) -> None:
    """Removes the directories of processes of this machine that were killed."""
    mine = _prefix(os.getpid()).split("-")[1]
    for path in Path(root).glob(f"ws-{mine}-*-*-*"):
        pid = int(path.name.split("-")[2], 16)
        try:
            alive = path.name.startswith(_prefix(pid))
        except OSError:
            alive = False
        # Another process may sweep at the same time, so the directory may be gone by now.
        with contextlib.suppress(FileNotFoundError):
            if not alive and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


class PrivateDirectory:
    """A directory only this user can enter, removed with the object or the process.

    A process that is killed leaves its directory behind; the next one that makes its own removes
    it.
    """

    def __init__(self) -> None:
        root = env.socket_root()
        try:
            sweep(root or tempfile.gettempdir())
            self.path = tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=root)
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
