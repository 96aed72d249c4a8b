"""Child processes driven over a pipe: engines, stand-in engines and trainer ranks of the tests.

Children are forked from servers that imported torch, or vLLM, once: starting one costs milliseconds
and none of them has run anything before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import Pipe, forkserver, popen_forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess

# Imported once by the servers that children are forked from. numba must not be among them: vLLM's
# CPU engine does not start in a process that loaded it.
_TORCH = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor"]
_VLLM = ["vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"]


class ChildError(Exception):
    """An exception raised inside a child, with its class name and traceback as text.

    Attributes:
        kind: Class name of the exception in the child.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class ChildGoneError(Exception):
    """A child that died before it answered."""


def _server(preload: list[str]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(preload)
    return server


_plain, _with_vllm = _server(_TORCH), _server(_VLLM)


def preload(modules: list[str]) -> None:
    """What children without vLLM have imported when they start; before the first of them."""
    _plain.set_forkserver_preload(modules)


class _Popen(popen_forkserver.Popen):
    """Forks from one of the servers above: other tests use the interpreter's own one."""

    def _launch(self, process: BaseProcess) -> None:
        assert isinstance(process, _Process)
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = process.server.connect_to_new_process
        try:
            super()._launch(process)  # type: ignore[misc]
        finally:
            forkserver.connect_to_new_process = usual


class _Process(ForkServerProcess):
    """A process started by ``_Popen``."""

    server = _plain

    @staticmethod
    def _Popen(process: BaseProcess) -> _Popen:
        return _Popen(process)


class _VllmProcess(_Process):
    """A process that vLLM is loaded in already."""

    server = _with_vllm


class Child:
    """A process that holds one object and runs its methods one at a time.

    Args:
        make: Builds the object in the child; must be importable.
        args: For ``make``.
        env: Environment variables set (or, for None, removed) before ``make`` runs.
        start_seconds: How long building may take.
        daemon: Whether the process may have no children of its own.
        vllm: Whether vLLM is needed in the child.
    """

    def __init__(
        self,
        make: Callable[..., object],
        *args: object,
        env: Mapping[str, str | None] | None = None,
        start_seconds: float = 60,
        daemon: bool = True,
        vllm: bool = False,
    ) -> None:
        self._pipe, theirs = Pipe()
        self.process = (_VllmProcess if vllm else _Process)(
            target=_serve, args=(make, args, dict(env or {}), theirs), daemon=daemon
        )
        self.process.start()
        theirs.close()
        self._start_seconds = start_seconds
        self._started = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ready(self) -> Child:
        """Waits until the object is built."""
        if not self._started:
            self.receive(self._start_seconds)
            self._started = True
        return self

    def send(self, method: str, *args: object) -> None:
        """Starts a call; its answer must be taken with :meth:`receive`."""
        self.ready()
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise ChildGoneError(f"process {self.pid} is gone") from error

    def receive(self, seconds: float = 60) -> object:
        """The answer to the oldest call.

        Raises:
            ChildError: What the child raised.
            ChildGoneError: If it died.
            TimeoutError: If it did not answer in time.
        """
        try:
            if not self._pipe.poll(seconds):
                raise TimeoutError(f"process {self.pid} did not answer within {seconds:g} s")
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise ChildGoneError(f"process {self.pid} is gone") from error
        if kind:
            raise ChildError(kind, value)
        return value

    def ask(self, method: str, *args: object, seconds: float = 60) -> object:
        """Runs a method and returns its result."""
        self.send(method, *args)
        return self.receive(seconds)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        """Ends the process in whatever state it is, and what it started."""
        import psutil

        started = []
        if self.process.is_alive():
            started = psutil.Process(self.pid).children(recursive=True)
        self.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._pipe.close()


def _serve(
    make: Callable[..., object],
    args: tuple[object, ...],
    env: dict[str, str | None],
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    import torch

    torch.set_num_threads(1)
    try:
        served = make(*args)
    except Exception as error:  # The test looks at it.
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))
        return
    pipe.send(("", None))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("", getattr(served, method)(*arguments)))
        except Exception as error:  # The test looks at it.
            pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))


def process_counts() -> tuple[int, int, int]:
    """(open descriptors, threads, resident KiB) of this process."""
    import psutil

    resident = psutil.Process().memory_info().rss // 1024
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident
