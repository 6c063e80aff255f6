"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

Beside these four: ``reason`` (why, in one word), ``stage`` (where), and of a refusal that compared
times ``predicted_ms`` and ``limit_ms``. OpenAI's clients keep what they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from isthmus.common import metrics
from isthmus.common.attainment import Verdict, judge_error
from isthmus.common.backoff import SHORT_WAIT_MS, retry_after_ms
from isthmus.common.errors import CapacityError, DrainingError, IsthmusError


def error_body(error: IsthmusError) -> dict[str, Any]:
    """Also counts it: every error that a client sees passes here once."""
    metrics.HTTP_ERRORS.labels(status=str(error.http_status), code=error.code).inc()
    message = error.message
    if error.stage and error.http_status >= 500 and error.stage not in message:
        message = f"{message} (stage: {error.stage})"
    body: dict[str, Any] = {
        "message": message,
        "type": error.openai_type,
        "param": error.param,
        "code": error.code,
        "reason": error.reason,
        "stage": error.stage,
    }
    if error.predicted_ms is not None:
        body["predicted_ms"] = round(error.predicted_ms, 3)
    if error.limit_ms is not None:
        body["limit_ms"] = round(error.limit_ms, 3)
    return {"error": body}


def error_response(error: IsthmusError, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    if judge_error(error, has_begun=False) is Verdict.REJECTED:
        all_headers["x-isthmus-admission"] = "reject"
    if isinstance(error, CapacityError | DrainingError):
        milliseconds = error.retry_after_ms or retry_after_ms(SHORT_WAIT_MS)
        all_headers["retry-after"] = str(max(1, -(-milliseconds // 1000)))
    return Response(
        orjson.dumps(error_body(error)),
        status_code=error.http_status,
        headers=all_headers,
        media_type="application/json",
    )
