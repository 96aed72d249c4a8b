"""The keeper's whole round, with a real router, a real server and Ray."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import ray

from generation.fleet import FleetHealthPolicy, GenerationFleetHealth, ShardState
from generation.keeper import FleetKeeper
from generation.router import GenerationRouter

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(120)

WAIT_S = 10.0


class Living:
    """A fleet whose only shard says that it lives."""

    def shard_liveness_ref(self, shard: int) -> ray.ObjectRef:
        return ray.put(True)


class Server(http.server.ThreadingHTTPServer):
    """Answers every POST with ``status``."""

    status = 200


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert isinstance(self.server, Server)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def post(base_url: str) -> int:
    request = urllib.request.Request(f"{base_url}/chat/completions", data=b"{}", method="POST")
    try:
        return urllib.request.urlopen(request, timeout=WAIT_S).status
    except urllib.error.HTTPError as error:
        return error.code


def test_failures_with_successes_between_leave_a_shard_in_the_rotation(
    local_ray: None, server: Server
):
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    health = GenerationFleetHealth(1, FleetHealthPolicy(unhealthy_threshold=2), [url])
    router = GenerationRouter(api_key=None)
    router.start()
    keeper = FleetKeeper(Living(), health, router=router)
    keeper.tick()
    try:
        for server.status in (500, 200, 500):
            assert post(router.base_url) == server.status
            keeper.tick()
        assert router.backends() == [url]
        assert post(router.base_url) == 500
        keeper.tick()
        assert health.state_of(0) is ShardState.DEAD
        assert router.backends() == []
    finally:
        router.close()
