"""Rows to sample from, and the tokens that the engine's own sampler would draw from them.

Float sums and exponentials differ in their last bits between numpy, torch and Triton. Where a draw,
a nucleus or a least probability lies that close to a border, either side of it is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from isthmus.common.types import SamplingParams
from isthmus.engine.sampler import draw_token
from isthmus.kernels.types import SamplingRows

BORDER = 2e-6  # of all weight; weights themselves agree to about 1e-7


@dataclass(frozen=True)
class SamplingCase:
    logits: NDArray[np.float32]  # [K, V]
    params: list[SamplingParams]
    draws: list[float]

    def rows(self) -> SamplingRows:
        return SamplingRows(
            temperature=torch.tensor([p.temperature for p in self.params], dtype=torch.float32),
            top_k=torch.tensor([p.top_k for p in self.params], dtype=torch.int32),
            top_p=torch.tensor([p.top_p for p in self.params], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in self.params], dtype=torch.float32),
            uniforms=torch.tensor(self.draws, dtype=torch.float64),
        )

    def right_tokens(self, row: int) -> set[int]:
        logits, params = self.logits[row], self.params[row]
        if params.is_greedy:
            return {int(logits.argmax())}
        return {
            draw_token(logits, replace(params, top_p=top_p, min_p=min_p), draw)
            for draw, top_p, min_p in product(
                _around(self.draws[row], np.nextafter(1.0, 0.0)),
                _around(params.top_p, 1.0) if params.top_p < 1 else [1.0],
                _around(params.min_p, 1.0) if params.min_p > 0 else [0.0],
            )
        }


def _around(value: float, most: float) -> list[float]:
    return [value, max(value - BORDER, 0.0), min(value + BORDER, float(most))]


@st.composite
def sampling_cases(draw: st.DrawFn, most_rows: int, most_tokens: int) -> SamplingCase:
    """Logits with equals among them, some so small that they weigh nothing, and masked ones."""
    num_rows = draw(st.integers(1, most_rows))
    vocab_size = draw(st.integers(1, most_tokens))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = random.normal(0, draw(st.sampled_from([0.0, 1.0, 4.0, 60.0])), (num_rows, vocab_size))
    if draw(st.booleans()):
        logits = logits.round()  # many equals
    logits[random.random(logits.shape) < draw(st.sampled_from([0.0, 0.5]))] = -np.inf
    logits[:, random.integers(vocab_size)] = 1.0
    filters = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-45, 0.3, 1.0, 2.5, 1e30]),
        top_k=st.sampled_from([0, 1, 2, 7, 50, 10_000]),
        top_p=st.sampled_from([0.0, 1e-4, 0.3, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    )
    uniform = st.floats(0, 1, exclude_max=True)
    return SamplingCase(
        logits.astype(np.float32),
        [draw(filters) for _ in range(num_rows)],
        [draw(uniform) for _ in range(num_rows)],
    )
