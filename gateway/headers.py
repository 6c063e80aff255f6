"""The headers of a request, found by name.

The framework's own walk over all that were sent for each that is asked for, of which most were not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from starlette.requests import Request

_SCOPE_KEY = "isthmus.headers"


def headers_of(request: Request) -> Mapping[str, str]:
    """By names in small letters; of those that were sent twice the first."""
    known = request.scope.get(_SCOPE_KEY)
    if known is None:
        sent = reversed(request.scope["headers"])
        known = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent}
        request.scope[_SCOPE_KEY] = known
    return cast("Mapping[str, str]", known)
