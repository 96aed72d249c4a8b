"""A small key-value store over TCP through which the ranks of a new group find each other.

It exists because a torch ``TCPStore`` client blocks for ever, whatever its timeout, when the
process that serves it is frozen; here every answer has a deadline on the client's side. It also
sees connections close, so the death of a rank is known at once and by name.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading

from weight_sync.comm.store_wire import (
    HEADER_BYTES,
    Found,
    Hello,
    Put,
    Refused,
    Reply,
    Wait,
    body_length,
    decode_request,
    frame,
)
from weight_sync.errors import TransportError

#: Value the server stores under a client's fate key when its connection is lost.
DIED = b"died"

#: How long :meth:`StoreServer.close` waits for its thread, in seconds.
_CLOSE_SECONDS = 5.0


class StoreServer:
    """Serves one store from a thread of its own until closed.

    Args:
        host: Address to bind, one that all participants can reach.
        token: Secret that clients must present.
        port: Port to bind; 0 takes a free one, which is how rebuilds get a fresh address.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(self, host: str, token: str, port: int = 0) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise TransportError(
                f"cannot serve the rendezvous on {host}:{port} ({error}); "
                "give an address of this host that the other participants can reach"
            ) from error
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._token = token
        self._values: dict[str, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"rendezvous-{self.port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes all its sockets; may be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._socket)
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one client until it leaves; notes its fate if it leaves without a word."""
        answers: set[asyncio.Task[None]] = set()
        fate_key: str | None = None
        try:
            hello = await _read(reader)
            if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self._token):
                await _reply(writer, Refused("the token is not the one of this rendezvous"))
                return
            fate_key = hello.fate_key
            await _reply(writer, Found())
            while True:
                # Reading goes on while a wait is being answered, so a lost client is seen at once.
                task = asyncio.create_task(self._answer(await _read(reader), writer))
                answers.add(task)
                task.add_done_callback(answers.discard)
        except TransportError as error:
            await _reply(writer, Refused(str(error)))
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # The client is gone, or the server closes: both end in the lines below.
        finally:
            for task in answers:
                task.cancel()
            writer.close()
            if fate_key is not None:
                await self._store(Put(fate_key, DIED, once=True))

    async def _answer(self, request: Hello | Put | Wait, writer: asyncio.StreamWriter) -> None:
        if isinstance(request, Put):
            await self._store(request)
            await _reply(writer, Found())
        elif isinstance(request, Wait):
            await _reply(writer, Found(await self._wait(request)))
        else:
            await _reply(writer, Refused("a connection says hello once"))

    async def _store(self, put: Put) -> None:
        async with self._changed:
            if not (put.once and put.key in self._values):
                self._values[put.key] = put.value
            if put.drop is not None:
                self._values.pop(put.drop, None)
            self._changed.notify_all()

    async def _wait(self, wait: Wait) -> dict[str, bytes]:
        def unless() -> list[str]:
            return [k for k in self._values if wait.unless and k.startswith(wait.unless)]

        def over() -> bool:
            return all(key in self._values for key in wait.keys) or bool(unless())

        async with self._changed:
            try:
                async with asyncio.timeout(wait.seconds):
                    await self._changed.wait_for(over)
            except TimeoutError:
                pass  # The client asked for what is there by then, and names what is missing.
            found = [key for key in wait.keys if key in self._values]
            return {key: self._values[key] for key in [*found, *unless()]}


async def _read(reader: asyncio.StreamReader) -> Hello | Put | Wait:
    length = body_length(await reader.readexactly(HEADER_BYTES))
    return decode_request(await reader.readexactly(length))


async def _reply(writer: asyncio.StreamWriter, reply: Reply) -> None:
    try:
        writer.write(frame(reply))
        await writer.drain()
    except OSError:
        pass  # The client left before its answer; its reader sees the same and ends.
