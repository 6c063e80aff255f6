"""The oracle at full length: pair = mixed instance = transformers, token for token.

``python -m benchmarks.identity`` takes about twenty minutes on two cores, half of them for the
reference, which is kept for the next run. Greedy fp32 output of one prefill + one decode instance
(every prompt computed on the former), of one mixed instance with another chunk size and of
``transformers`` on the same weights; seeded sampling of the first two, one at a time and all at
once; and how far bf16 agrees with fp32. Exits with 1 when tokens differ that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from pathlib import Path

import httpx
import tokenizers

from benchmarks.cluster import MODEL_NAME, OUT, serve
from benchmarks.export_model import export
from tests.support.oracle import awkward_prompts, reference_tokens

Outputs = list[list[int]]
CONCURRENCY = 8
MIXED = ("--dtype", "float32", "--mixed", "1", "--max-num-batched-tokens", "256")


async def outputs_of(
    url: str, prompts: Outputs, max_tokens: int, concurrency: int = CONCURRENCY, **sampling: object
) -> Outputs:
    """Token ids that a server gives for each prompt, end-of-sequence ignored."""
    gate = asyncio.Semaphore(concurrency)
    sampling = {"temperature": 0} | sampling
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(index: int, prompt: list[int]) -> list[int]:
            body = {
                "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens,
                "ignore_eos": True, "return_token_ids": True, **sampling,
            }  # fmt: skip
            if "seed" in sampling:
                body["seed"] = int(str(sampling["seed"])) + index
            async with gate:
                answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise RuntimeError(answer.text)
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


def agreement(left: Outputs, right: Outputs) -> dict[str, float]:
    """How many sequences are equal, and the share of tokens before the first difference."""
    equal = sum(a == b for a, b in zip(left, right, strict=True))
    common = 0
    for a, b in zip(left, right, strict=True):
        same = [x == y for x, y in zip(a, b, strict=False)]
        common += same.index(False) if False in same else len(same)
    total = sum(map(len, left))
    return {"sequences": len(left), "equal": equal, "tokens_before_difference": common / total}


def run_side(
    model: Path, prompts: Outputs, tokens: int, num_sampled: int, *flags: str
) -> dict[str, Outputs]:
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    some = prompts[:num_sampled]
    with serve(model, *flags) as running:
        return {
            "greedy": asyncio.run(outputs_of(running.url, prompts, tokens)),
            "sampled": asyncio.run(outputs_of(running.url, some, tokens, **sampled)),
            "sampled_alone": asyncio.run(outputs_of(running.url, some[:20], tokens, 1, **sampled)),
        }


def cached_reference(model: Path, prompts: Outputs, tokens: int) -> Outputs:
    """The reference depends on neither our code nor the machine's mood: computed once."""
    key = hashlib.sha256(json.dumps([prompts, tokens]).encode()).hexdigest()[:16]
    file = OUT / f"reference-{key}.json"
    if not file.exists():
        file.write_text(json.dumps(reference_tokens(model, prompts, tokens)))
    outputs: Outputs = json.loads(file.read_text())
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sampled", type=int, default=60, help="prompts sampled with a seed")
    parser.add_argument("--referenced", type=int, default=200, help="prompts for transformers")
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--actuator", choices=("ray", "process"), default="process")
    args = parser.parse_args()
    model = export(OUT / "sample-bf16")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = awkward_prompts(
        tokenizer, args.prompts, block_size=16, chunk_size=512, longest=args.longest
    )
    # Every prompt goes to the prefill instance: no weighing of times, no minimal length.
    flags = ("--actuator", args.actuator, "--set", "router.min_remote_tokens=0",
             "--set", "router.policy=round_robin")  # fmt: skip
    sides = {}
    for name, count, more in (
        ("pair", args.prompts, ("--dtype", "float32")),
        ("mixed", args.prompts, MIXED),
        ("bf16", args.prompts // 4, ("--dtype", "bfloat16")),
    ):
        num_sampled = min(count, args.sampled)
        sides[name] = run_side(model, prompts[:count], args.tokens, num_sampled, *flags, *more)
        print(f"{name} done", flush=True)
    reference = cached_reference(model, prompts[: args.referenced], args.tokens)
    pair, mixed, half = sides["pair"], sides["mixed"], sides["bf16"]
    result = {
        "greedy pair = mixed": agreement(pair["greedy"], mixed["greedy"]),
        "greedy pair = transformers": agreement(pair["greedy"][: len(reference)], reference),
        "sampled pair = mixed": agreement(pair["sampled"], mixed["sampled"]),
        "sampled in a batch = alone": agreement(pair["sampled"][:20], pair["sampled_alone"]),
        "greedy bf16 ~ fp32 (reported)": agreement(
            half["greedy"], pair["greedy"][: len(half["greedy"])]
        ),
    }
    (OUT / "identity.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    must = [value for name, value in result.items() if "reported" not in name]
    sys.exit(0 if all(value["equal"] == value["sequences"] for value in must) else 1)


if __name__ == "__main__":
    main()
