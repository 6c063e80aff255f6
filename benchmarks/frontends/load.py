"""A loop of streamed chat requests that costs little: one thread, epoll, connections kept.

Closed (``--concurrency``: the next request when the last has ended) or open (``--rate``: requests a
second, at random times, whatever has ended).

``python -m benchmarks.frontends.load`` prints one JSON object: requests of the measured span, their
times, and the CPU time that the process tree of ``--pid`` used for them. A request's text begins
with a number of its own, so that no prefix cache shortens anything. Sockets have TCP_NODELAY.
Linux.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.machine import cpu_seconds, tree
from isthmus.workload.figures import quantile

END_OF_CHUNKS = b"\r\n0\r\n\r\n"
NUM_TEXTS = 256
SILENCE_S = 20.0
# Short words that every vocabulary has as one token each.
WORDS = """
    the of and to in is that it was for on are with as his they be at one have this from or had by
    hot but some what there we can out other were all your when up use how said an each she which
    do their time if will way about many then them would write like so these her long make thing
    see him two has look more day could go come did my sound no most number who over know water
    than call first people may down side been now find any new work part take get place made live
    where after back little only round man year came show every good me give our under
"""


@dataclass(frozen=True, slots=True)
class Target:
    """One streamed request of ``num_tokens`` output tokens, as bytes with a place for a number."""

    host: str
    port: int
    head: bytes
    tails: tuple[bytes, ...]

    def request(self, number: int) -> bytes:
        return self.head + b"%012d" % number + self.tails[number % NUM_TEXTS]


def make_target(url: str, model: str, prompt_words: int, num_tokens: int) -> Target:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    source, words, mark = random.Random(1), WORDS.split(), "#" * 12
    bodies = []
    for _ in range(NUM_TEXTS):
        text = " ".join(source.choices(words, k=prompt_words))
        body = {
            "model": model, "stream": True, "max_tokens": num_tokens, "temperature": 0,
            "messages": [{"role": "user", "content": f"{mark} {text}"}],
        }  # fmt: skip
        bodies.append(json.dumps(body).encode())
    # Of one length, so that one head does for all: JSON may end with spaces.
    size = max(map(len, bodies))
    begin = bodies[0].index(mark.encode())
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {size}\r\n\r\n"
    ).encode() + bodies[0][:begin]
    tails = tuple(body[begin + len(mark) :].ljust(size - begin - len(mark)) for body in bodies)
    return Target(parts.hostname, parts.port, head, tails)


@dataclass(slots=True)
class Times:
    """Milliseconds; requests that ended in the measured span."""

    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


class Connection:
    """One request at a time. Raises RuntimeError for an answer that is not the whole one."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.socket = socket.create_connection((target.host, target.port), timeout=SILENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parts: list[bytes] = []
        self._sent = self._first = 0.0

    def send(self, number: int) -> None:
        self._parts.clear()
        self._first = 0.0
        self._sent = time.perf_counter()
        self.socket.sendall(self._target.request(number))

    def receive(self) -> tuple[float, float] | None:
        """(TTFT, E2E) in milliseconds once the answer is whole."""
        data = self.socket.recv(1 << 18)
        self._parts.append(data)
        if not self._first and b"data: " in data:
            self._first = time.perf_counter()
        if not data.endswith(END_OF_CHUNKS):
            if not data:
                raise RuntimeError("the connection was closed: " + self._whole()[-500:].decode())
            if len(data) >= len(END_OF_CHUNKS) or not self._whole().endswith(END_OF_CHUNKS):
                return None
        now = time.perf_counter()
        self._check()
        return (self._first - self._sent) * 1e3, (now - self._sent) * 1e3

    def _whole(self) -> bytes:
        return b"".join(self._parts)

    def _check(self) -> None:
        answer = self._whole()
        is_whole = answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer
        # A server may merge tokens into one event, so the number of events says nothing.
        if not is_whole or not self._first or b'"length"' not in answer:
            raise RuntimeError(f"not the answer asked for: {answer[:2000].decode()}")


class ClosedLoop:
    """``concurrency`` connections, each sending its next request when the last one has ended."""

    def __init__(self, target: Target, concurrency: int) -> None:
        self._connections = {}
        self._poll = select.epoll()
        self._number = random.Random().randrange(10**9)
        for _ in range(concurrency):
            connection = Connection(target)
            self._connections[connection.socket.fileno()] = connection
            self._poll.register(connection.socket, select.EPOLLIN)
            self._send(connection)

    def run(self, seconds: float) -> Times:
        """Requests that end within the next seconds."""
        times, ends = Times(), time.perf_counter() + seconds
        while (now := time.perf_counter()) < ends:
            ready = self._poll.poll(SILENCE_S)
            if not ready:
                raise RuntimeError(f"nothing arrived for {SILENCE_S:.0f} s (since {now})")
            for number, _ in ready:
                connection = self._connections[number]
                taken = connection.receive()
                if taken is not None:
                    times.ttft.append(taken[0])
                    times.e2e.append(taken[1])
                    self._send(connection)
        return times

    def close(self) -> None:
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def _send(self, connection: Connection) -> None:
        self._number += 1
        connection.send(self._number)


class OpenLoop:
    """Requests at the times of a Poisson process, each on a connection that has nothing to do."""

    def __init__(self, target: Target, rate: float) -> None:
        self._target, self._rate = target, rate
        self._connections: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._poll = select.epoll()
        self._random = random.Random(1)
        self._number = random.Random().randrange(10**9)

    def run(self, seconds: float) -> Times:
        """Requests that end within the next seconds."""
        times, due = Times(), time.perf_counter()
        ends = due + seconds
        while (now := time.perf_counter()) < ends:
            if now >= due:
                self._send()
                due += self._random.expovariate(self._rate)
                continue
            for number, _ in self._poll.poll(min(due, ends) - now):
                connection = self._connections[number]
                taken = connection.receive()
                if taken is not None:
                    times.ttft.append(taken[0])
                    times.e2e.append(taken[1])
                    self._idle.append(connection)
        return times

    def close(self) -> None:
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def _send(self) -> None:
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = Connection(self._target)
            self._connections[connection.socket.fileno()] = connection
            self._poll.register(connection.socket, select.EPOLLIN)
        self._number += 1
        connection.send(self._number)


def measure(
    loop: ClosedLoop | OpenLoop, pid: int, warm_s: float, seconds: float
) -> dict[str, float]:
    loop.run(warm_s)
    pids = {process.pid for process in tree(pid)}
    before, start = cpu_seconds(pids), time.perf_counter()
    times = loop.run(seconds)
    wall_s = time.perf_counter() - start
    after = cpu_seconds(pids)
    used_s = sum(used - before.get(key, 0.0) for key, used in after.items())
    count = len(times.e2e)
    return {
        "requests": count,
        "requests_per_s": count / wall_s,
        "cpu_share": used_s / wall_s,
        "requests_per_cpu_s": count / used_s if used_s else 0.0,
        "cpu_us": 1e6 * used_s / max(1, count),
        **{f"ttft_p{p}_ms": percentile(times.ttft, p) for p in (5, 50, 99)},
        **{f"e2e_p{p}_ms": percentile(times.e2e, p) for p in (5, 50, 99)},
    }


def percentile(values: Sequence[float], share: int) -> float:
    return quantile(sorted(values), share / 100) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the server under test")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0 = closed")
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    target = make_target(args.url, args.model, args.prompt_words, args.tokens)
    loop = OpenLoop(target, args.rate) if args.rate else ClosedLoop(target, args.concurrency)
    try:
        print(json.dumps(measure(loop, args.pid, args.warm_s, args.seconds)))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
