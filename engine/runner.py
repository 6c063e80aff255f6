"""Runs one planned step: build the batch, forward, sample. The only part that waits for the model.

Called by the engine thread alone, without the engine's lock. It reads the step's sequences and
their tables, which nobody changes meanwhile.
"""

from __future__ import annotations

import torch

from isthmus.engine import sampler
from isthmus.engine.batch import build_step_input
from isthmus.engine.kv_store import KvStore
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.sampler import Sampled
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence

StepTokens = dict[Sequence, Sampled]


class ModelRunner:
    def __init__(self, model: LanguageModel, kv_store: KvStore, device: str) -> None:
        self._model = model
        self._kv_store = kv_store
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepTokens:
        """A token for every sequence whose tokens are all computed by this step; sequences that
        want prompt log-probabilities get theirs appended. Raises what the model raises."""
        step = build_step_input(plan, self._kv_store.layout.block_size, self._device)
        logits = self._model.forward(step.forward, self._kv_store.tensor)  # [K, V] float32
        sampler.append_prompt_logprobs(logits, step)
        return dict(zip(step.sampled, sampler.sample(logits, step), strict=True))
