from __future__ import annotations

from starlette.requests import Request

from isthmus.gateway.headers import headers_of


def test_first_of_two_headers_of_one_name_counts_as_it_does_for_the_framework() -> None:
    sent = [(b"x-request-id", b"one"), (b"host", b"h\xe9"), (b"x-request-id", b"two")]
    request = Request({"type": "http", "headers": sent})
    headers = headers_of(request)
    for name in ("x-request-id", "host", "x-none"):
        assert headers.get(name) == request.headers.get(name)
