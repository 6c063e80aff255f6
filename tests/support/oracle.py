"""What every path through the system must reproduce: prompts at the awkward lengths, and the
tokens that ``transformers`` gives for them on the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

TEXTS = (
    "The isthmus of Corinth joins the Peloponnese to the mainland of Greece.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "Größe, naïve façade — 東京は日本の首都です。 🙂🚀 Ελλάδα",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "한국어 문장과 ภาษาไทย และ العربية in one line.",
)


def awkward_prompts(
    tokenizer: object, count: int, *, block_size: int, chunk_size: int, longest: int, seed: int = 7
) -> list[list[int]]:
    """``count`` prompts of token ids: one token; around a block and a chunk; long; shared prefixes;
    unicode; and random lengths for the rest. The longest are few, since they cost the most."""
    source = random.Random(seed)
    base: list[int] = []
    while len(base) < 4 * longest:
        for text in TEXTS:
            base += tokenizer.encode(text).ids  # type: ignore[attr-defined]

    def cut(length: int) -> list[int]:
        start = source.randrange(0, len(base) - length)
        return base[start : start + length]

    edges = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1]
    edges += [chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size, 2 * chunk_size + 1]
    prompts = [cut(length) for length in edges if 0 < length <= longest]
    prompts += [tokenizer.encode(text).ids for text in TEXTS]  # type: ignore[attr-defined]
    prompts += [cut(longest), cut(longest - 1)]
    shared = cut(min(3 * block_size + 5, longest // 2))
    prompts += [shared + cut(length) for length in (1, 3, block_size, block_size + 7)]
    prompts += [list(shared), list(shared)]
    while len(prompts) < count:
        length = int(2 ** source.uniform(1, 8.5))
        prompts.append(cut(min(length, longest)))
    return prompts[:count]


def reference_tokens(
    model_path: Path, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str = "float32"
) -> list[list[int]]:
    """Greedy continuations by ``transformers``, end-of-sequence ignored, one prompt at a time.

    ``model_path`` is a directory or a .gguf file."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": model_path.name} if model_path.is_file() else {}
    folder = model_path.parent if options else model_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    model.eval()
    outputs: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens: list[int] = []
            step = torch.tensor([list(prompt)])
            cache = None
            for _ in range(max_tokens):
                result = model(input_ids=step, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                tokens.append(int(result.logits[0, -1].argmax()))
                step = torch.tensor([[tokens[-1]]])
            outputs.append(tokens)
    return outputs
