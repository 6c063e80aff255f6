"""An inference server without a model, for routers that pass HTTP on: it answers at once.

``python -m benchmarks.frontends.http_worker --port P`` serves until stdin is closed: one thread and
epoll, so that it costs little beside what is measured. A chat request gets ``--tokens`` events,
all in one write, or with ``--step-ms`` one event a step, every open request in the same step, as an
engine does it. Linux.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer_events(model: str, words: list[str]) -> list[bytes]:
    """One event a token, the last of them with all that ends the answer."""
    frames = []
    for position, word in enumerate(words):
        is_last = position == len(words) - 1
        content = {
            "id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": model,
            "choices": [{
                "index": 0, "delta": {"content": word}, "logprobs": None,
                "finish_reason": "length" if is_last else None,
            }],
        }  # fmt: skip
        frames.append(b"data: " + json.dumps(content).encode() + b"\n\n")
    events = [chunk(frame) for frame in frames]
    events[0] = HEAD + events[0]
    events[-1] += chunk(b"data: [DONE]\n\n") + END
    return events


def json_answer(content: object) -> bytes:
    data = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(data),
        data,
    )


class Worker:
    """Owns its sockets. ``run`` until stdin ends."""

    def __init__(self, port: int, model: str, num_tokens: int, step_s: float) -> None:
        self._events = answer_events(model, [f" w{number}" for number in range(num_tokens)])
        self._whole = b"".join(self._events)
        # What routers ask a worker for before they trust it.
        self._facts = json_answer(
            {
                "object": "list",
                "status": "ok",
                "model_path": model,
                "served_model_name": model,
                "is_generation": True,
                "max_num_reqs": 4096,
                "version": "0",
                "dp_size": 1,
                "data": [{"id": model, "object": "model", "owned_by": "mock", "created": 1}],
            }
        )
        self._plain = json_answer(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 1,
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": " w0"},
                        "finish_reason": "length",
                    }
                ],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                "kv_transfer_params": {"remote_engine_id": "mock", "remote_block_ids": [0]},
            }
        )
        self._step_s = step_s
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(sys.stdin, select.EPOLLIN)
        self._sockets: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        self._sent: dict[int, int] = {}  # events of each request that is being answered

    def run(self) -> None:
        next_step = 0.0
        while True:
            is_stepping = bool(self._sent)
            wait_s = max(0.0, next_step - time.perf_counter()) if is_stepping else -1
            for number, _ in self._poll.poll(wait_s):
                if number == self._listener.fileno():
                    self._accept()
                elif number == sys.stdin.fileno():
                    return
                else:
                    self._read(number)
            if self._sent and (now := time.perf_counter()) >= next_step:
                if is_stepping:
                    self._step()
                next_step = now + self._step_s

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[client.fileno()] = client
        self._received[client.fileno()] = b""
        self._poll.register(client, select.EPOLLIN)

    def _read(self, number: int) -> None:
        try:
            data = self._sockets[number].recv(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            self._close(number)
            return
        received = self._received[number] + data
        begin = received.find(b"\r\n\r\n")
        size = _body_size(received[:begin]) if begin >= 0 else 0
        if begin < 0 or len(received) < begin + 4 + size:
            self._received[number] = received
            return
        self._received[number] = b""
        self._answer(number, received[:begin], received[begin + 4 :])

    def _answer(self, number: int, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat/completions"):
            self._write(number, self._facts)
        elif b'"stream":true' not in body.replace(b" ", b""):
            self._write(number, self._plain)
        elif self._step_s:
            self._sent[number] = 0
        else:
            self._write(number, self._whole)

    def _step(self) -> None:
        for number, position in list(self._sent.items()):
            if position + 1 == len(self._events):
                del self._sent[number]
            else:
                self._sent[number] = position + 1
            self._write(number, self._events[position])

    def _write(self, number: int, data: bytes) -> None:
        try:
            self._sockets[number].sendall(data)
        except ConnectionError:
            self._close(number)

    def _close(self, number: int) -> None:
        self._sent.pop(number, None)
        if client := self._sockets.pop(number, None):
            del self._received[number]
            client.close()


def _body_size(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=0.0, help="0 = all tokens in one write")
    args = parser.parse_args()
    Worker(args.port, args.model, args.tokens, args.step_ms / 1e3).run()


if __name__ == "__main__":
    main()
