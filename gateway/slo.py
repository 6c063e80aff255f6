"""Which class of service a request has, and its targets.

The class is said by the body (``slo.class``), else by a header, else by the tenant, else by the
configuration; targets in the body or in headers take the place of the class's own. What a body and
a header say of one thing must be the same. Everything that is wrong is refused by its name, before
a prompt is tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from isthmus.common.errors import InvalidRequestError
from isthmus.common.slo import SloConfig
from isthmus.common.types import Slo
from isthmus.gateway.schemas import MAX_TARGET_MS, SloBody

CLASS_HEADER = "x-isthmus-slo-class"
_TARGET_HEADERS = {name: f"x-isthmus-{name}-ms" for name in ("ttft", "tpot", "e2e")}
_HEADERS = frozenset({CLASS_HEADER, *_TARGET_HEADERS.values()})
_OWN = "x-isthmus-"
_KNOWN = _HEADERS | {"x-isthmus-session"}
_OF_ANSWERS = tuple(
    f"{_OWN}{name}"
    for name in (
        "request-id", "target-", "predicted-", "policy", "admission", "decode", "prefill",
        "local-prefill",
    )
)  # fmt: skip
_NOTHING_SAID = SloBody()
ValueT = TypeVar("ValueT", str, float)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")


@lru_cache(maxsize=256)  # most requests have their class's targets
def class_headers(slo: Slo) -> Mapping[str, str]:
    """What an answer says of the class and the targets that held for it."""
    targets = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms}
    told = {f"x-isthmus-target-{k}-ms": f"{v:.12g}" for k, v in targets.items() if v is not None}
    return {CLASS_HEADER: slo.class_name, **told}


class ClassesOfService:
    def __init__(self, config: SloConfig) -> None:
        self._config = config
        self._slos = {name: config.slo_of(name) for name in config.classes}

    @property
    def default(self) -> Slo:
        return self._slos[self._config.default_class]

    def resolve(self, body: SloBody | None, headers: Mapping[str, str], of_tenant: str) -> Slo:
        """``of_tenant``: the class of the tenant's requests that name none; may be empty.

        Raises InvalidRequestError naming the parameter or header.
        """
        _refuse_unknown(headers)
        if body is None and _HEADERS.isdisjoint(headers):  # as mostly
            return self._class(None, headers, of_tenant)
        said = body or _NOTHING_SAID
        slo = self._class(said.class_name, headers, of_tenant)

        def target(name: str, in_body: float | None, of_class: float | None) -> float | None:
            header = _TARGET_HEADERS[name]
            value = _one_of(f"slo.{name}_ms", in_body, header, _number(headers, header))
            return of_class if value is None else value

        return replace(
            slo,
            ttft_ms=target("ttft", said.ttft_ms, slo.ttft_ms),
            tpot_ms=target("tpot", said.tpot_ms, slo.tpot_ms),
            e2e_ms=target("e2e", said.e2e_ms, slo.e2e_ms),
        )

    def _class(self, said: str | None, headers: Mapping[str, str], of_tenant: str) -> Slo:
        header = headers.get(CLASS_HEADER)
        name = _one_of("slo.class", said, CLASS_HEADER, header)
        if name is None:
            name = of_tenant or self._config.default_class
        slo = self._slos.get(name)
        if slo is None:
            known = ", ".join(sorted(self._slos))
            message = f"there is no class of service {name[:80]!r}; there are {known}"
            param = CLASS_HEADER if said is None else "slo.class"
            raise InvalidRequestError(message, param=param, stage="validate")
        return slo


def _refuse_unknown(headers: Mapping[str, str]) -> None:
    """As of a body: what is misspelt would be ignored, and its sender believe it heeded. What an
    answer has may come back, as proxies and clients that copy headers send it."""
    for name in headers:
        if name.startswith(_OWN) and name not in _KNOWN and not name.startswith(_OF_ANSWERS):
            known = ", ".join(sorted(_KNOWN))
            message = f"there is no header {name[:80]}; there are {known}"
            raise InvalidRequestError(message, param=name[:80], stage="validate")


def _number(headers: Mapping[str, str], header: str) -> float | None:
    text = headers.get(header)
    if text is None:
        return None
    value = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < value <= MAX_TARGET_MS:
        message = f"{header} must be milliseconds, more than 0 and at most {MAX_TARGET_MS}"
        raise InvalidRequestError(f"{message} (got {text[:80]!r})", param=header, stage="validate")
    return value


def _one_of(
    param: str, in_body: ValueT | None, header: str, in_header: ValueT | None
) -> ValueT | None:
    if in_body is not None and in_header is not None and in_body != in_header:
        message = f"{param} and the header {header} disagree: send one of them"
        raise InvalidRequestError(message, param=param, stage="validate")
    return in_header if in_body is None else in_body
