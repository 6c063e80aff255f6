"""Classes of service and tenants as an operator may write them, and as not."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import ConfigError
from isthmus.common.slo import hash_key
from isthmus.common.types import Slo

DIGEST = hash_key("sk-a")


def loaded(folder: Path, text: str) -> ClusterConfig:
    file = folder / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, environ={})


def test_classes_are_added_to_those_there_are_and_changed_in_part(tmp_path: Path) -> None:
    slo = loaded(
        tmp_path,
        "slo: {default_class: gold, classes: {gold: {ttft_ms: 300, mode: strict},"
        " interactive: {tpot_ms: 70}}}",
    ).slo
    assert set(slo.classes) == {"default", "interactive", "batch", "gold"}
    assert slo.slo_of("gold") == Slo("gold", 300, is_strict=True)
    shipped = ClusterConfig().slo.slo_of("interactive")
    assert slo.slo_of("interactive").ttft_ms == shipped.ttft_ms
    assert slo.slo_of("interactive").tpot_ms == 70
    assert ClusterConfig().slo.slo_of("default") == Slo()


def test_tenants_are_known_by_their_keys_in_either_form(tmp_path: Path) -> None:
    text = f"tenants: {{a: {{key_hashes: [{DIGEST.upper()}], weight: 2}}, b: {{api_keys: [sk-b]}}}}"
    config = loaded(tmp_path, text)
    assert config.tenants["a"].all_hashes == [DIGEST]
    assert config.tenants["b"].all_hashes == [hash_key("sk-b")]
    assert config.tenant_weights == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slo: {default_class: gold}", "default_class 'gold' is not one of slo.classes"),
        ("slo: {classes: {gold: {quantile: 1}}}", "slo.classes.gold.quantile: "),
        ("slo: {classes: {gold: {tppot_ms: 1}}}", "did you mean 'slo.classes.gold.tpot_ms'?"),
        ("slo: {classes: {'a b': {}}}", "slo.classes.a b"),
        ("tenants: {a: {wieght: 2}}", "did you mean 'tenants.a.weight'?"),
        ("tenants: {a: {api_keys: ['']}}", "tenants.a.api_keys.0: "),
        ("tenants: {a: {key_hashes: [abc]}}", "64 hexadecimal digits"),
        (
            "tenants: {a: {api_keys: [k], default_class: gold}}",
            "tenants.a.default_class 'gold' is not one of",
        ),
        ("tenants: {a: {api_keys: [k]}, b: {weight: 2}}", "tenants.b has no key"),
        (
            f"tenants: {{a: {{api_keys: [sk-a]}}, b: {{key_hashes: [{DIGEST}]}}}}",
            "one key is in tenants.b and in tenants.a",
        ),
        (
            "{gateway: {api_keys: [k]}, tenants: {a: {api_keys: [k]}}}",
            "one key is in tenants.a and in gateway.api_keys",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert sentence in caught.value.message


def test_a_mistake_does_not_repeat_the_part_of_the_tree_that_it_is_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "slo: {default_class: gold}")
    assert caught.value.message == "slo: default_class 'gold' is not one of slo.classes"


@pytest.mark.parametrize(
    ("gateways", "mode", "is_apart"),
    [(1, "auto", False), (2, "auto", True), (2, "embedded", False), (1, "process", True)],
)
def test_routers_run_apart_where_one_ledger_must_serve_several(
    gateways: int, mode: str, is_apart: bool
) -> None:
    overrides = {"gateway": {"replicas": gateways}, "router": {"mode": mode}}
    assert load_config(overrides=overrides, environ={}).has_router_processes is is_apart
