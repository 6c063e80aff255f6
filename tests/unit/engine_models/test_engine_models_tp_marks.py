"""What a leader says of KV while a step runs holds on every rank, however late the others are."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.decoder import Decoder
from isthmus.engine.models.types import ForwardBatch
from isthmus.engine.tp_steps import Follower, LeaderModel
from tests.support.tiny_models import save, tiny_model
from tests.support.tp_ranks import TIMEOUT_S, float32_config, load_ranks, tp_groups

NUM_LAYERS = 3
NUM_TOKENS = 4


def chunk() -> ForwardBatch:
    """Of a prompt that goes on: no logits are wanted, so nothing is exchanged at the end."""
    tokens = torch.arange(NUM_TOKENS)
    return ForwardBatch(
        input_ids=tokens + 5,
        positions=tokens,
        slot_mapping=tokens + NUM_TOKENS,
        query_start=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        logits_index=torch.tensor([], dtype=torch.int64),
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
    )


class Marks:
    """Remembers the follower's KV of the layers that are said to be final."""

    address = 0

    def __init__(self, kv: torch.Tensor) -> None:
        self.seen: list[torch.Tensor] = []
        self._kv = kv

    def mark(self, num_layers: int) -> None:
        self.seen.append(self._kv[:, :num_layers].clone())


class LateKernels:
    """A follower's: it writes the KV of a layer only when the leader has gone as far as it can."""

    def __init__(self, kernels: Any, leader_wrote: threading.Semaphore) -> None:
        self._kernels = kernels
        self._leader_wrote = leader_wrote

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def rope_and_cache(self, *arguments: Any, **options: Any) -> None:
        assert self._leader_wrote.acquire(timeout=TIMEOUT_S)
        self._kernels.rope_and_cache(*arguments, **options)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tiny_model("llama", num_hidden_layers=NUM_LAYERS), tmp_path)


def test_marked_layers_are_final_on_a_follower_that_is_late(model: Path) -> None:
    with tp_groups(2) as groups:
        leader_part, follower_part = load_ranks(float32_config(model), groups).models
        assert isinstance(leader_part, Decoder)
        assert isinstance(follower_part, Decoder)
        stores = [
            KvStore(layout_of(part.spec, NUM_TOKENS), 3, "cpu")
            for part in (leader_part, follower_part)
        ]
        here, there = (store.tensor for store in stores)
        marks = Marks(there)
        wrote = threading.Semaphore(0)
        follower_part._kernels = LateKernels(follower_part._kernels, wrote)  # type: ignore[assignment]

        class Noted(Marks):
            def mark(self, num_layers: int) -> None:
                marks.mark(num_layers)
                wrote.release()  # only now may the follower go on with this layer

        steps: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        follower = Follower(follower_part, stores[1], "cpu")
        thread = threading.Thread(target=lambda: follower.run(steps.get()))
        thread.start()
        LeaderModel(leader_part, steps.put, "cpu").forward(chunk(), here, Noted(there))
        at_the_end = there.clone()
        thread.join()

    assert [seen.shape[1] for seen in marks.seen] == list(range(NUM_LAYERS))
    for seen in marks.seen:
        assert torch.equal(seen, there[:, : seen.shape[1]])
    assert there[:, NUM_LAYERS - 1].count_nonzero()
    assert torch.equal(at_the_end, there), "the leader's pass was over before the follower's"
