"""Which class of service a request has, and what is said to those who ask for one there is not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from isthmus.common.errors import InvalidRequestError
from isthmus.common.slo import SloClassConfig, SloConfig
from isthmus.common.types import Slo
from isthmus.gateway.schemas import ChatBody, parse_body
from isthmus.gateway.slo import ClassesOfService

CLASSES = ClassesOfService(
    SloConfig(
        classes={
            "default": SloClassConfig(),
            "gold": SloClassConfig(ttft_ms=500, tpot_ms=50, quantile=0.99, mode="strict"),
            "bulk": SloClassConfig(weight=0.1),
        }
    )
)


def resolve(slo: Any = None, tenant_class: str = "", **headers: str) -> Slo:
    raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], "slo": slo}
    body = parse_body(ChatBody, orjson.dumps(raw))
    named = {f"x-isthmus-{name.replace('_', '-')}": value for name, value in headers.items()}
    return CLASSES.resolve(body.slo, named, tenant_class)


def test_who_asks_for_nothing_gets_the_default_class_without_targets() -> None:
    assert resolve() == Slo()


def test_a_class_brings_its_targets_weight_and_mode() -> None:
    gold = resolve({"class": "gold"})
    assert gold == Slo("gold", 500, 50, None, quantile=0.99, weight=1.0, is_strict=True)
    assert resolve(slo_class="gold") == gold


def test_body_and_header_come_before_the_tenants_class_and_that_before_the_default() -> None:
    assert resolve(tenant_class="bulk").class_name == "bulk"
    assert resolve({"class": "gold"}, tenant_class="bulk").class_name == "gold"
    assert resolve(slo_class="gold", tenant_class="bulk").class_name == "gold"


def test_targets_of_a_request_take_the_place_of_its_classs() -> None:
    slo = resolve({"class": "gold", "ttft_ms": 900}, tpot_ms="12.5", e2e_ms="7000")
    assert (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms) == (900, 12.5, 7000)
    assert slo.is_strict


@pytest.mark.parametrize(
    ("slo", "headers", "param", "words"),
    [
        ({"class": "silver"}, {}, "slo.class", "'silver'; there are bulk, default, gold"),
        (None, {"slo_class": "silver"}, "x-isthmus-slo-class", "there are bulk, default, gold"),
        (None, {"ttft_ms": "soon"}, "x-isthmus-ttft-ms", "milliseconds"),
        (None, {"ttft_ms": "0"}, "x-isthmus-ttft-ms", "more than 0"),
        (None, {"tpot_ms": "-3"}, "x-isthmus-tpot-ms", "milliseconds"),
        (None, {"tpot_ms": "nan"}, "x-isthmus-tpot-ms", "milliseconds"),
        (None, {"e2e_ms": "9" * 9}, "x-isthmus-e2e-ms", "at most 86400000"),
        ({"ttft_ms": 0}, {}, "slo.ttft_ms", "greater than 0"),
        ({"tpot_ms": "5"}, {}, "slo.tpot_ms", "valid number"),
        ({"class": 3}, {}, "slo.class", "valid string"),
        ({"mode": "strict"}, {}, "slo.mode", "unknown parameter"),
        ({"class": "gold"}, {"slo_class": "bulk"}, "slo.class", "disagree"),
        ({"ttft_ms": 5}, {"ttft_ms": "6"}, "slo.ttft_ms", "disagree"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(
    slo: Any, headers: dict[str, str], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        resolve(slo, **headers)
    assert caught.value.param == param
    assert caught.value.http_status == 400


def test_body_and_header_may_say_the_same_twice() -> None:
    assert resolve({"class": "gold", "ttft_ms": 5}, slo_class="gold", ttft_ms="5.0").ttft_ms == 5


def test_a_misspelt_header_is_refused_by_its_name_and_what_an_answer_had_may_come_back() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(slo_ttft_ms="100")
    assert caught.value.param == "x-isthmus-slo-ttft-ms"
    assert "x-isthmus-ttft-ms" in caught.value.message
    assert resolve(session="one", request_id="r", target_ttft_ms="5", policy="goodput") == Slo()
