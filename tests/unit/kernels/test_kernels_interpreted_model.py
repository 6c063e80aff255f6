"""A whole model on Triton's kernels, as the registry puts them together, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.models import TINY, random_decoder
from isthmus.engine.models.types import ForwardBatch
from isthmus.kernels import select
from isthmus.kernels.registry import Implementation

pytestmark = pytest.mark.interpreted

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 20
BLOCKS = (2, 1)


def batch(token_ids: list[int], first: int) -> ForwardBatch:
    """The tokens of one sequence from position ``first`` on; the last one's logits."""
    positions = torch.arange(first, first + len(token_ids))
    table = torch.tensor([BLOCKS], dtype=torch.int32)
    length = first + len(token_ids)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids),
        positions=positions,
        slot_mapping=table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=table,
        logits_index=torch.tensor([len(token_ids) - 1]),
        max_query_len=len(token_ids),
        max_seq_len=length,
    )


def prompt_and_step(implementation: Implementation) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after a prompt, and after one more token."""
    kernels = select("cpu", 1, implementation)
    model = random_decoder(TINY, kernels, "cpu", max_model_len=64, dtype="float32")
    kv = torch.full(
        (3, TINY.num_layers, 2, TINY.num_kv_heads, BLOCK_SIZE, TINY.head_dim), torch.nan
    )
    prompt = [(7 * i) % TINY.vocab_size for i in range(NUM_PROMPT_TOKENS)]
    return model.forward(batch(prompt, 0), kv), model.forward(batch([5], NUM_PROMPT_TOKENS), kv)


def test_a_prompt_and_a_step_give_the_references_logits() -> None:
    for actual, expected in zip(
        prompt_and_step("triton"), prompt_and_step("reference"), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert actual.argmax() == expected.argmax()
