"""One engine shard as a process of its own: a vLLM ``LLM`` with its workers, on its own GPUs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from weight_sync.engine import LocalLLM
from weight_sync.errors import EngineStateError, PeerDeadError

_START_SECONDS = 600.0
_CALL_SECONDS = 600.0
_END_SECONDS = 10.0


class EngineProcess:
    """An ``EngineShard``; its calls wait for each other, as an engine's do.

    Args:
        devices: Device of each worker, e.g. ``("cuda:2", "cuda:3")``, as this process sees them.
        arguments: Of ``LLM``.
    """

    def __init__(self, devices: Sequence[str], arguments: Mapping[str, object]) -> None:
        self.workers = len(devices)
        self._lock = threading.Lock()
        self._started = False
        order = None if devices[0] == "cpu" else visible(devices, _present())
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(order, dict(arguments), theirs))
        self._process.start()
        theirs.close()

    def ready(self) -> EngineProcess:
        """Waits until the engine runs.

        Raises:
            PeerDeadError: If it died.
            EngineStateError: If it could not start.
        """
        with self._lock:
            if not self._started:
                self._answer(_START_SECONDS)
                self._started = True
        return self

    def ask(self, method: str, *args: object) -> object:
        """Runs a method of :class:`_Served`.

        Raises:
            PeerDeadError: If the process is gone.
            EngineStateError: If the method failed or did not answer in time.
        """
        with self._lock:
            try:
                self._pipe.send((method, args))
            except OSError as error:
                raise PeerDeadError("the engine's process is gone", stage="rpc") from error
            return self._answer(_CALL_SECONDS)

    def _answer(self, seconds: float) -> object:
        try:
            if not self._pipe.poll(seconds):
                raise EngineStateError(f"an engine did not answer within {seconds:g} s; restart it")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerDeadError("the engine's process is gone", stage="rpc") from error
        if not good:
            raise EngineStateError(f"an engine failed: {value}")
        return value

    # --- EngineShard ----------------------------------------------------------------------------

    def call(self, request: bytes) -> list[bytes]:
        """Runs a request on every worker."""
        return self.ask("call", request)  # type: ignore[return-value]

    def pause(self) -> None:
        """Nothing runs between calls."""

    def invalidate(self) -> None:
        """Drops the prefix cache."""
        self.ask("invalidate")

    def resume(self) -> None:
        """Nothing was paused."""

    def set_version(self, version: int) -> None:
        """Stamps outputs where this vLLM can."""
        self.ask("set_version", version)

    def kill(self) -> None:
        """Kills the engine and its workers in whatever they do."""
        if self._process.pid is not None:
            # The group may not be there yet, or all of it may be gone already.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_END_SECONDS)

    def close(self) -> None:
        """Lets the engine end by itself for a moment, then kills what is left."""
        self._pipe.close()
        self._process.join(_END_SECONDS)
        self.kill()


class _Served:
    """The engine, inside its process."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        import vllm

        self.llm = vllm.LLM(**arguments)
        shard = LocalLLM(self.llm)
        self.call, self.invalidate, self.set_version = (
            shard.call,
            shard.invalidate,
            shard.set_version,
        )

    def llm_call(self, method: str, *args: object) -> None:
        """Runs a method of ``LLM``."""
        getattr(self.llm, method)(*args)

    def close(self) -> None:
        """Ends the engine's workers."""
        self.llm.llm_engine.engine_core.shutdown()

    def apply(self, function: Callable[..., object], *args: object) -> object:
        """Runs a function on the engine."""
        return function(self.llm, *args)


def visible(devices: Sequence[str], present: Sequence[str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a process that works on some devices.

    The others come after its own: memory of trainers on them is opened by their handles.

    Args:
        devices: E.g. ``("cuda:2", "cuda:3")``.
        present: What this process sees, as its own variable names it.
    """
    mine = [int(device.partition(":")[2]) for device in devices]
    others = [number for number in range(len(present)) if number not in mine]
    return ",".join(present[number] for number in (*mine, *others))


def _present() -> list[str]:
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        return setting.split(",")
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _serve(devices: str | None, arguments: dict[str, object], pipe: Connection) -> None:
    # Its workers are killed with it, whatever state they are in.
    os.setpgid(0, 0)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        served = _Served(arguments)
    except Exception as error:  # Told to whoever waits for the engine.
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        return
    pipe.send((True, None))
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            served.close()
            return
        try:
            pipe.send((True, getattr(served, method)(*args)))
        except Exception as error:  # Told to whoever asked.
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
