"""Runs planned steps: build the batch, forward, sample. The only part that waits for the model.

Called by the engine thread alone, without the engine's lock. It reads the step's sequences and
their tables, which nobody changes meanwhile.

``launch`` takes a step when it is planned, ``wait`` gives its tokens; in between the next step may
be planned and launched. ``ModelRunner`` computes on the CPU, in the engine thread, so it does all
its work in ``wait``; ``device_runner`` lets a device run behind the host.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from isthmus.common.layer_progress import LayerCounter, LayerProgress
from isthmus.engine import sampler
from isthmus.engine.batch import KNOWN, StepInput, build_step_input, forward_batch
from isthmus.engine.kv_store import KvStore
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.sampler import Sampled, SampledToken
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import SeqStatus, Sequence

StepTokens = dict[Sequence, Sampled]


class LaunchedStep(Protocol):
    def wait(self) -> StepTokens:
        """A token for every sequence whose tokens are all computed by this step; sequences that
        want prompt log-probabilities get theirs appended. Raises what the model raises.

        Once, in the order of the launches, when the results of all earlier steps are entered.
        """
        ...

    @property
    def progress(self) -> LayerProgress | None:
        """Of a step whose launch was to be watched. A step that did not run makes none."""
        ...


class Runner(Protocol):
    def launch(self, plan: StepPlan, *, is_watched: bool = False) -> LaunchedStep:
        """Begins a step; at most the one before may be unfinished. Raises what the model raises."""
        ...


class ModelRunner:
    """A ``Runner`` for the CPU."""

    def __init__(self, model: LanguageModel, kv_store: KvStore) -> None:
        self._model = model
        self._kv_store = kv_store
        self._sampled_before: dict[Sequence, int] = {}  # of the step launched last
        self._tokens_before: list[int] = []  # of the step run last, 0 for a sequence that failed

    def launch(self, plan: StepPlan, *, is_watched: bool = False) -> LaunchedStep:
        block_size = self._kv_store.layout.block_size
        step = build_step_input(plan, block_size, self._sampled_before)
        self._sampled_before = {sequence: row for row, sequence in enumerate(step.sampled)}
        return _HostStep(self, plan, step, LayerCounter() if is_watched else None)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, step: StepInput, counter: LayerCounter | None = None
    ) -> StepTokens:
        tokens_before, self._tokens_before = self._tokens_before, [0] * len(step.sampled)
        if all(sequence.status is not SeqStatus.RUNNING for sequence in plan.scheduled):
            return {}  # everyone ended after the step was planned
        if step.has_unknown_tokens:
            unknown = step.sources != KNOWN
            step.input_ids[unknown] = np.array(tokens_before)[step.sources[unknown]]
        logits = self.forward(step, counter)  # [K, V] float32
        sampler.append_prompt_logprobs(logits, step)
        sampled = sampler.sample(logits, step)
        self._tokens_before = [t.token_id if isinstance(t, SampledToken) else 0 for t in sampled]
        return dict(zip(step.sampled, sampled, strict=True))

    def forward(self, step: StepInput, counter: LayerCounter | None) -> torch.Tensor:
        store = self._kv_store
        logits = self._model.forward(
            forward_batch(step), store.tensor, counter, kv_scales=store.scales
        )
        if counter is not None:  # of several ranks on a GPU nothing is known before
            counter.mark(store.layout.num_layers)
        return logits


class _HostStep:
    """Waits to be asked for: the thread that would wait is the one that computes."""

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, step: StepInput, counter: LayerCounter | None
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._step = step
        self._counter = counter

    @property
    def progress(self) -> LayerProgress | None:
        return self._counter

    def wait(self) -> StepTokens:
        return self._runner.run(self._plan, self._step, self._counter)
