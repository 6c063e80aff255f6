"""A model dealt to several ranks gives the numbers of one rank, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch

from isthmus.common.config import ModelConfig
from isthmus.common.errors import ConfigError, InstanceLostError
from isthmus.common.model_files import locate_model
from isthmus.engine.models import registry
from isthmus.engine.models.checkpoint import open_checkpoint
from isthmus.engine.models.config import DecoderConfig
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.shard import Cut, Split, cuts_of, shard_of, share_of, supported_sizes
from isthmus.engine.models.weights import expected_shapes
from isthmus.engine.tp_group import TorchGroup
from tests.support.ipv6 import needs_ipv6
from tests.support.paged import PagedSequences
from tests.support.tiny_models import save, save_gguf, tiny_model
from tests.support.tp_ranks import float32_config, load_ranks, on_ranks, tp_groups

TOKENS = random.Random(3).choices(range(96), k=29)
# Nine query heads over three KV heads, as in the sample model: two ranks get six and three.
UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[TorchGroup]]:
    with tp_groups(2) as groups:
        yield groups


@pytest.fixture(scope="module")
def quartet() -> Iterator[list[TorchGroup]]:
    with tp_groups(4) as groups:
        yield groups


def config_of(path: Path) -> DecoderConfig:
    return registry.configure(open_checkpoint(locate_model(str(path))).config)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama-tied", {}),
        ("llama-biased", {}),
        ("mistral-sliding", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", UNEVEN),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_the_very_bits_of_one(
    family: str, overrides: dict[str, Any], dtype: str, tmp_path: Path, pair: list[TorchGroup]
) -> None:
    config = ModelConfig(path=str(save(tiny_model(family, **overrides), tmp_path)), dtype=dtype)
    one, two = load_model(config, "cpu", 1), load_ranks(config, pair)
    assert two.spec.fingerprint == one.spec.fingerprint
    for chunks in ([20, 1, 8], [1] * 9 + [20]):
        expected = PagedSequences(one).run(0, TOKENS, chunks)
        assert torch.equal(PagedSequences(two).run(0, TOKENS, chunks), expected)


@pytest.mark.parametrize("family", ["llama-biased", "qwen3"])
def test_kv_heads_are_repeated_where_ranks_outnumber_them(
    family: str, tmp_path: Path, quartet: list[TorchGroup]
) -> None:
    config = float32_config(save(tiny_model(family), tmp_path))
    one, four = load_model(config, "cpu", 1), load_ranks(config, quartet)
    assert [model.spec.num_kv_heads for model in four.models] == [1, 1, 1, 1]
    assert [model.spec.num_heads for model in four.models] == [1, 1, 1, 1]
    expected = PagedSequences(one).run(0, TOKENS, [20, 1, 8])
    assert torch.equal(PagedSequences(four).run(0, TOKENS, [20, 1, 8]), expected)
    first, second, third, _ = four.kv_of  # two ranks to each KV head
    written = ~torch.isnan(first)
    assert torch.equal(first[written], second[written])
    assert not torch.equal(first[written], third[written])


@pytest.mark.parametrize("split", Split)
def test_a_row_is_the_same_bits_in_any_batch_and_chunk(
    split: Split, tmp_path: Path, quartet: list[TorchGroup]
) -> None:
    model = load_ranks(float32_config(save(tiny_model("llama-biased"), tmp_path)), quartet, split)
    first, second = TOKENS, TOKENS[::-1]
    alone = [PagedSequences(model).run(0, tokens, [29]) for tokens in (first, second)]
    model.kv_of.clear()
    both = PagedSequences(model, num_sequences=2)
    pieces: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in ({0: first[:10]}, {0: first[10:11], 1: second[:7]}, {0: first[11:], 1: second[7:]}):
        for index, logits in both.step(step).items():
            pieces[index].append(logits)
    for index, expected in enumerate(alone):
        assert torch.equal(torch.cat(pieces[index]), expected)


def test_summed_parts_differ_from_one_rank_by_rounding_alone(
    tmp_path: Path, pair: list[TorchGroup]
) -> None:
    config = float32_config(save(tiny_model("llama-biased", **UNEVEN), tmp_path))
    expected = PagedSequences(load_model(config, "cpu", 1)).run(0, TOKENS, [29])
    logits = PagedSequences(load_ranks(config, pair, Split.INPUT)).run(0, TOKENS, [29])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_step_that_needs_no_logits_still_writes_kv_on_every_rank(
    tmp_path: Path, pair: list[TorchGroup]
) -> None:
    config = float32_config(save(tiny_model("llama"), tmp_path))
    one, two = load_model(config, "cpu", 1), load_ranks(config, pair)
    sequences = PagedSequences(two)
    assert sequences.step({0: TOKENS[:20]}, "none")[0].shape == (0, 96)
    expected = PagedSequences(one).run(0, TOKENS, [20, 9])[20:]
    assert torch.equal(sequences.step({0: TOKENS[20:]})[0], expected)


def test_every_element_belongs_to_the_ranks_it_should(tmp_path: Path) -> None:
    """All parts of a tensor, put together, are the tensor; only KV heads may be there twice."""
    config = config_of(save(tiny_model("llama-biased"), tmp_path))
    shapes = expected_shapes(config)
    for split in Split:
        for size in (2, 4):
            cuts = [cuts_of(config, shard_of(config, r, size), split, shapes) for r in range(size)]
            for name, shape in shapes.items():
                counts = np.zeros(shape, dtype=int)
                for cut in cuts:
                    counts[cut[name].slices(shape)] += 1
                is_whole = cuts[0][name].shape_of(shape) == shape  # norms, biases of sums
                is_repeated = size == 4 and name.split(".")[-2] in {"k_proj", "v_proj"}
                assert (counts == (size if is_whole else 2 if is_repeated else 1)).all(), name


def test_heads_that_cannot_be_dealt_are_refused_with_the_sizes_that_work(tmp_path: Path) -> None:
    config = config_of(save(tiny_model("llama"), tmp_path / "even"))
    assert supported_sizes(config) == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"tp_size 3 .* 4 query heads over 2 KV heads.*: 1, 2, 4"):
        shard_of(config, 0, 3)
    uneven = config_of(save(tiny_model("llama", **UNEVEN), tmp_path / "uneven"))
    assert supported_sizes(uneven) == [1, 2, 3, 9]
    assert shard_of(uneven, 0, 2).kv_heads == (range(2), range(2, 3))
    assert shard_of(uneven, 0, 2).query_heads == (range(6), range(6, 9))


def test_digests_are_dealt_by_bytes(tmp_path: Path) -> None:
    shapes = expected_shapes(config_of(save(tiny_model("llama"), tmp_path)))
    shares = [share_of(shapes, rank, 3) for rank in range(3)]
    assert set().union(*shares) == set(shapes)
    assert sum(len(share) for share in shares) == len(shapes)
    sizes = [sum(np.prod(shapes[name]) for name in share) for share in shares]
    assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "safetensors"])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    if kind == "safetensors":
        path = save(model, tmp_path)
    else:
        weight_type = gguf.GGMLQuantizationType[kind]
        path = save_gguf(model, tmp_path / "m.gguf", weight_type=weight_type)
    checkpoint = open_checkpoint(locate_model(str(path)))
    config = registry.configure(checkpoint.config)
    for split in Split:
        for rank in range(2):
            cuts = cuts_of(config, shard_of(config, rank, 2), split, expected_shapes(config))
            for name, cut in cuts.items():
                whole = checkpoint.read(name)
                part = checkpoint.read(name, cut)
                assert torch.equal(part, whole[cut.slices(tuple(whole.shape))]), name


def test_columns_of_a_long_tensor_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.engine.models.gguf._VALUES_AT_ONCE", 1000)
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    checkpoint = open_checkpoint(locate_model(str(path)))
    name = "model.layers.1.mlp.down_proj.weight"
    part = checkpoint.read(name, Cut(rows=range(3, 61), columns=range(5, 90)))
    assert torch.equal(part, checkpoint.read(name)[3:61, 5:90])


def test_a_rank_that_does_not_come_ends_the_others_wait() -> None:
    with tp_groups(2, timeout_s=0.5) as groups, pytest.raises(InstanceLostError, match="lost"):
        groups[0].join(torch.ones(1, 2), [2, 2])


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_ranks_listen_on_their_own_host_alone(host: str) -> None:
    """Collectives trust whoever reaches them."""

    def listeners() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

    before = listeners()
    with tp_groups(2, host=host) as groups:
        ours = listeners() - before
        assert ours
        assert {name for name, _ in ours} == {host}
        parts = on_ranks(2, lambda rank: groups[rank].sum(torch.full((1, 2), float(rank + 1))))
        assert all(torch.equal(part, torch.full((1, 2), 3.0)) for part in parts)


def test_ranks_give_each_other_what_they_have(pair: list[TorchGroup]) -> None:
    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[bytes]]:
        x = torch.arange(4.0).view(2, 2) + 10 * rank
        own = x[:, : 2 - rank]  # two columns and one
        group = pair[rank]
        payloads = group.exchange(bytes([rank]))
        return group.sum(x), group.join(own, [2, 1]), group.join_on_leader(own, [2, 1]), payloads

    leader, follower = on_ranks(2, work)
    joined = torch.tensor([[0.0, 1.0, 10.0], [2.0, 3.0, 12.0]])
    for result in (leader, follower):
        assert torch.equal(result[0], torch.tensor([[10.0, 12.0], [14.0, 16.0]]))
        assert torch.equal(result[1], joined)
        assert result[3] == [b"\0", b"\1"]
    assert torch.equal(leader[2], joined)
    assert torch.equal(follower[2], joined[:, 2:])
