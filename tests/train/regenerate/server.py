"""A small OpenAI-compatible server over real HTTP, with faults on demand."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def default_answer(body: dict) -> dict:
    """A message that depends on what was asked and with which seed, as a sampling target's does."""
    asked = json.dumps([body["messages"], body.get("tools"), body.get("seed"), body["temperature"]], sort_keys=True)
    return {"role": "assistant", "content": f"answer {sha256(asked.encode()).hexdigest()[:12]}"}


class FakeServer:
    """`with FakeServer(...) as server`: serves on loopback until the block ends.

    Args:
        fault: (body, number of the request from 0) -> the name of a fault, or None. `500`, `503`, `400`, `401`:
            that status; `429`: with Retry-After `retry_after`; `hang`: no answer; `cut`: the connection closes in
            the middle of the body; `drop`: before the head; `text`: 200 that is not JSON; `shape`: JSON of another
            form; `abort`: a broken-off answer.
        delay: seconds an answer takes.
        answer: body -> message; finish: body, message -> finish_reason.
    """

    def __init__(
        self,
        *,
        model: str | list[str] = "toy",
        fault: Callable[[dict, int], str | None] = lambda body, number: None,
        delay: float = 0.0,
        answer: Callable[[dict], dict] = default_answer,
        finish: Callable[[dict, dict], str] = lambda body, message: "tool_calls" if "tool_calls" in message else "stop",
        retry_after: str = "0",
        context: int = 2048,
        port: int = 0,
    ):
        self.models = [model] if isinstance(model, str) else model
        self.fault, self.delay, self.answer, self.finish = fault, delay, answer, finish
        self.retry_after, self.context = retry_after, context
        self.asked: list[dict] = []
        self.times: list[float] = []
        self.headers: list[dict] = []
        self.answered: list[dict] = []
        self.close_next = False  # close the connection behind the next answer, as a server does that is stopped
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.fake = self
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self) -> None:
        """The server is gone: open connections are cut, new ones refused."""
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._http.connections):
            _cut(connection)

    def chat(self, handler: "_Handler", body: dict) -> None:
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self.times.append(time.monotonic())
            self.headers.append(dict(handler.headers))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            fault = self.fault(body, number)
            self._closing.wait(60 if fault == "hang" else self.delay)
            self._reply(handler, body, fault)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _reply(self, handler: "_Handler", body: dict, fault: str | None) -> None:
        message = self.answer(body)
        finish = "abort" if fault == "abort" else self.finish(body, message)
        words = len(str(message.get("content")).split())
        reply = json.dumps({
            "id": "x", "object": "chat.completion", "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": len(body["messages"]), "completion_tokens": words},
        }).encode()  # fmt: skip
        if fault in ("400", "401", "500", "503"):
            handler.send(int(fault), b'{"message": "said the server"}')
        elif fault == "429":
            handler.send(429, b"busy", {"Retry-After": self.retry_after})
        elif fault == "text":
            handler.send(200, b"<html>the proxy's page</html>")
        elif fault == "shape":
            handler.send(200, b'{"object": "error", "message": "no choices here"}')
        elif fault == "cut":
            handler.head(200, len(reply))
            handler.wfile.write(reply[: len(reply) // 2])
            handler.wfile.flush()
            _cut(handler.connection)
        elif fault in ("drop", "hang"):
            _cut(handler.connection)
        else:
            handler.send(200, reply)
            handler.close_connection = self.close_next
            if fault is None:
                with self._lock:
                    self.answered.append(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args):
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        pass  # clients that go away are part of the tests


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        fake = self.server.fake
        if self.path != "/v1/models":
            self.send(404, b"{}")
            return
        data = [{"id": name, "root": f"/models/{name}", "max_model_len": fake.context} for name in fake.models]
        self.send(200, json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.fake.chat(self, body)

    def head(self, status, length, headers=None):
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(length),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status, data, headers=None):
        self.head(status, len(data), headers)
        self.wfile.write(data)
        self.wfile.flush()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # gone already
        connection.shutdown(socket.SHUT_RDWR)
