"""What rounding KV costs in quality: logits over int8 KV beside those over the weights' own dtype.

``python -m benchmarks.kv_dtype`` takes a minute on one core. The sample model in bfloat16 goes on
from some texts, greedily over bfloat16 KV; then every run below is given the same tokens and its
logits of the continuation are compared, row by row. So a difference does not grow by itself:

- ``float32``: KV not rounded at all, as a yardstick;
- ``int8``: one instance that keeps int8 from the first token on;
- ``converted``: a pair whose prefill instance keeps bfloat16 and whose decode instance int8.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import torch

from isthmus.common.config import ModelConfig
from isthmus.common.model_files import locate_model
from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.types import ForwardBatch, LanguageModel
from isthmus.gateway.tokenizer import load_tokenizer
from isthmus.kernels import select

BLOCK_SIZE = 16
TEXTS = (
    "The isthmus of Corinth joins the Peloponnese to the mainland of Greece. In antiquity",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "Photosynthesis is the process by which green plants turn light into chemical energy. First,",
    "Dear Sir or Madam,\n\nI am writing to complain about the delivery of my order, which",
    "The three laws of thermodynamics can be stated as follows.\n\n1.",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
)


@dataclass
class Difference:
    """Over all rows. ``kl``: mean Kullback-Leibler divergence from the bfloat16 run, in nats."""

    rows: int
    same_greedy: float
    largest: float
    mean: float
    kl: float


class Sequence:
    """One sequence over a store of its own."""

    def __init__(self, model: LanguageModel, kv_dtype: str, num_tokens: int) -> None:
        self.num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
        self.store = KvStore(layout_of(model.spec, BLOCK_SIZE, kv_dtype), self.num_blocks, "cpu")
        self._model = model
        self.length = 0

    def run(self, token_ids: list[int]) -> torch.Tensor:
        """Logits float32 [T, V] of the tokens, which come next."""
        count, first = len(token_ids), self.length
        self.length = first + count
        positions = torch.arange(first, self.length)
        batch = ForwardBatch(
            input_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions + BLOCK_SIZE,  # block 0 is nobody's
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            block_table=torch.arange(1, self.num_blocks, dtype=torch.int32)[None],
            logits_index=torch.arange(count),
            max_query_len=count,
            max_seq_len=self.length,
        )
        return self._model.forward(batch, self.store.tensor, kv_scales=self.store.scales)


def continued(model: LanguageModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedily, over KV of the weights' own dtype."""
    sequence = Sequence(model, "auto", len(prompt) + num_tokens)
    logits, tokens = sequence.run(prompt), list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits[-1].argmax()))
        logits = sequence.run(tokens[-1:])
    return tokens


def logits_of(model: LanguageModel, kv_dtype: str, tokens: list[int], split: int) -> torch.Tensor:
    """Of the tokens behind the first ``split``; ``converted`` keeps these in the weights' dtype
    until they are computed."""
    if kv_dtype != "converted":
        sequence = Sequence(model, kv_dtype, len(tokens))
        sequence.run(tokens[:split])
        return sequence.run(tokens[split:])
    source, sequence = (Sequence(model, d, len(tokens)) for d in ("auto", "int8"))
    source.run(tokens[:split])
    _convert(source.store, sequence.store)
    sequence.length = split
    return sequence.run(tokens[split:])


def _convert(source: KvStore, target: KvStore) -> None:
    assert target.scales is not None
    for block in range(source.num_blocks):
        out = target.tensor[block], target.scales[block]
        select("cpu").quantise_kv(source.tensor[block], torch.int8, out)


def compared(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> Difference:
    a, b = torch.cat(expected), torch.cat(actual)
    error = (a - b).abs()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return Difference(
        rows=len(a),
        same_greedy=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        largest=float(error.max()),
        mean=float(error.mean()),
        kl=float((log_a.exp() * (log_a - log_b)).sum(-1).mean()),
    )


def measure(num_tokens: int) -> dict[str, Difference]:
    files = locate_model("sample")
    tokenizer = load_tokenizer(files)
    model = load_model(ModelConfig(dtype="bfloat16"), "cpu", 1)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    texts = [continued(model, prompt, num_tokens) for prompt in prompts]
    logits: dict[str, list[torch.Tensor]] = {}
    for kind in ("auto", "float32", "int8", "converted"):
        logits[kind] = [
            logits_of(model, kind, text, len(prompt))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    return {
        kind: compared(logits["auto"], found) for kind, found in logits.items() if kind != "auto"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=60, help="of each continuation")
    found = measure(parser.parse_args().tokens)
    for kind, difference in found.items():
        print(f"{kind:10} {json.dumps(asdict(difference))}")


if __name__ == "__main__":
    main()
