"""The sampler of steps that run behind the host: the rules of ``sampler``, all rows at once.

What a token depends on is known when its step is launched, even if the token before it is not:

    draw        the request's seed and the output's index
    penalties   how often the sequence has each token: counted on the device, where tokens are drawn
    min_tokens  the output's index; stop tokens that must not come yet get a bias of −∞

Tokens, and log-probabilities that were asked for, are sent to the host; ``collect`` reads them when
the step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.common.types import SamplingParams, TokenLogprob
from isthmus.engine.batch import PromptRows, StepInput
from isthmus.engine.penalty_tables import PenaltyTables
from isthmus.engine.philox import uniforms
from isthmus.engine.sampler import Sampled, SampledToken, unusable, usable_temperature
from isthmus.engine.sequence import Sequence
from isthmus.engine.staging import Buffer, Readback, Staging
from isthmus.engine.stop_rules import must_not_stop_yet
from isthmus.kernels import Kernels
from isthmus.kernels.types import Penalties, SamplingRows, TokenScores

_PADDING = -1  # in a row of biased tokens
_BIAS_STEP = 16  # widths of those rows; beyond the first, memory of its own is taken
_USUAL_TOP = 20  # alternatives of a token; likewise
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HostScores:
    """``TokenScores`` on the host, once they have arrived."""

    token_ids: NDArray[Any]
    logprobs: NDArray[Any]
    ranks: NDArray[Any]
    top_ids: NDArray[Any]
    top_logprobs: NDArray[Any]

    def describe(self, row: int, num_top: int) -> TokenLogprob:
        top_ids = self.top_ids[row, :num_top].tolist()
        top_logprobs = self.top_logprobs[row, :num_top].tolist()
        return TokenLogprob(
            int(self.token_ids[row]),
            float(self.logprobs[row]),
            int(self.ranks[row]),
            tuple(zip(top_ids, top_logprobs, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """What a step samples: on the device at once, on the host when its results have arrived."""

    token_ids: torch.Tensor  # int64 [K]
    sampled: list[Sequence]
    host_ids: NDArray[Any]
    is_usable: NDArray[Any]
    scores: HostScores | None
    prompt_scores: list[tuple[PromptRows, HostScores]]

    def collect(self) -> dict[Sequence, Sampled]:
        """Appends the prompts' log-probabilities to their sequences as well."""
        for rows, scores in self.prompt_scores:
            count = rows.sequence.request.sampling.prompt_logprobs or 0
            rows.sequence.prompt_logprobs.extend(
                scores.describe(row, count) for row in range(rows.count)
            )
        token_ids, is_usable = self.host_ids.tolist(), self.is_usable.tolist()
        return {
            sequence: self._sampled(row, sequence, token_ids[row])
            if is_usable[row]
            else unusable(sequence)
            for row, sequence in enumerate(self.sampled)
        }

    def _sampled(self, row: int, sequence: Sequence, token_id: int) -> SampledToken:
        num_top = sequence.request.sampling.logprobs
        if num_top is None or self.scores is None:
            return SampledToken(token_id)
        return SampledToken(token_id, self.scores.describe(row, num_top))


class DeviceSampler:
    """Used by the runner, between its ``begin`` and ``end`` of staging and readback.

    Parameters that do not change are staged when the batch does."""

    def __init__(
        self, kernels: Kernels, staging: Staging, readback: Readback, tables: PenaltyTables
    ) -> None:
        self._kernels = kernels
        self._staging = staging
        self._readback = readback
        self._tables = tables
        self._vocab_size = tables.vocab_size
        self._batch: _Batch | None = None

    @staticmethod
    def input_buffers(max_seqs: int, max_rows: int) -> dict[str, Buffer]:
        return {
            "sample_rows": Buffer(max_seqs, torch.int64),
            "temperature": Buffer(max_seqs, torch.float32),
            "top_k": Buffer(max_seqs, torch.int32),
            "top_p": Buffer(max_seqs, torch.float64),
            "min_p": Buffer(max_seqs, torch.float32),
            "uniforms": Buffer(max_seqs, torch.float64),
            "bias_ids": Buffer(max_seqs * _BIAS_STEP, torch.int64),
            "biases": Buffer(max_seqs * _BIAS_STEP, torch.float32),
            "prompt_ids": Buffer(max_rows, torch.int64),
            **PenaltyTables.input_buffers(max_seqs),
        }

    @staticmethod
    def result_buffers(max_seqs: int) -> dict[str, Buffer]:
        return {
            "token_ids": Buffer(max_seqs, torch.int64),
            "is_usable": Buffer(max_seqs, torch.bool),
            "logprobs": Buffer(max_seqs, torch.float32),
            "ranks": Buffer(max_seqs, torch.int64),
            "top_ids": Buffer(max_seqs * _USUAL_TOP, torch.int64),
            "top_logprobs": Buffer(max_seqs * _USUAL_TOP, torch.float32),
        }

    def launch(self, logits: torch.Tensor, step: StepInput) -> PendingTokens:
        """``logits`` float32 [K, V], or with rows of padding behind; they are changed."""
        prompt_scores = self._launch_prompts(logits, step.prompt_rows)
        if not step.sampled:  # prompts that go on in the next step
            return _nothing(logits.device, prompt_scores)
        if self._batch is None or self._batch.sampled != step.sampled:
            self._batch = self._stage_batch(step)
        batch = self._batch
        rows = self._sampled_rows(logits, step)  # [K', V]
        bias_ids, biases = self._stage_biases(batch, step)
        if biases is not None or batch.penalties is not None:
            self._kernels.adjust_logits(
                rows, bias_ids=bias_ids, biases=biases, penalties=batch.penalties
            )
        token_ids, is_usable = self._draw(rows, batch, step)
        if batch.penalties is not None:
            self._tables.count(batch.penalties, token_ids)
        host_ids = self._readback.put("token_ids", token_ids)
        scores = None
        if batch.num_top is not None:
            found = self._kernels.describe_tokens(rows, token_ids, batch.num_top)
            scores = HostScores(
                host_ids,
                self._readback.put("logprobs", found.logprobs),
                self._readback.put("ranks", found.ranks),
                self._readback.put("top_ids", found.top_ids),
                self._readback.put("top_logprobs", found.top_logprobs),
            )
        is_usable_there = self._readback.put("is_usable", is_usable)
        return PendingTokens(
            token_ids, step.sampled, host_ids, is_usable_there, scores, prompt_scores
        )

    def _sampled_rows(self, logits: torch.Tensor, step: StepInput) -> torch.Tensor:
        """Of the sequences that get a token, a view where these are all."""
        if not step.prompt_rows:
            return logits[: len(step.sampled)]
        return logits[self._staging.put("sample_rows", np.array(step.sample_rows, np.int64))]

    def _stage_batch(self, step: StepInput) -> _Batch:
        params = [sequence.request.sampling for sequence in step.sampled]
        put = self._staging.put
        tops = [p.logprobs for p in params if p.logprobs is not None]
        return _Batch(
            sampled=step.sampled,
            temperature=put(
                "temperature", np.array([*map(usable_temperature, params)], np.float32)
            ),
            top_k=put("top_k", np.array([min(p.top_k, _MOST_INT32) for p in params], np.int32)),
            top_p=put("top_p", np.array([p.top_p for p in params], np.float64)),
            min_p=put("min_p", np.array([p.min_p for p in params], np.float32)),
            penalties=self._tables.stage(step, self._staging),
            random_rows=[row for row, p in enumerate(params) if not p.is_greedy],
            biased_rows=[row for row, p in enumerate(params) if _may_bias(p)],
            num_top=max(tops) if tops else None,
        )

    def _draw(
        self, rows: torch.Tensor, batch: _Batch, step: StepInput
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draws = np.zeros(len(step.sampled), dtype=np.float64)
        if batch.random_rows:
            draws[batch.random_rows] = uniforms(
                [step.sampled[row].request.sampling.seed for row in batch.random_rows],
                [step.output_index(row) for row in batch.random_rows],
            )
        uniform = self._staging.put("uniforms", draws)
        return self._kernels.draw_tokens(
            rows, SamplingRows(batch.temperature, batch.top_k, batch.top_p, batch.min_p, uniform)
        )

    def _stage_biases(
        self, batch: _Batch, step: StepInput
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """int64 and float32 [K', A]: biases, and −∞ for stop tokens that must not come yet."""
        by_row: dict[int, dict[int, float]] = {}
        for row in batch.biased_rows:
            sampling = step.sampled[row].request.sampling
            biases = _summed(sampling)
            if must_not_stop_yet(sampling, step.output_index(row)):
                stops = [i for i in sampling.stop_token_ids if i < self._vocab_size]
                biases |= dict.fromkeys(stops, -np.inf)
            if biases:
                by_row[row] = biases
        if not by_row:
            return None, None
        width = -(-max(map(len, by_row.values())) // _BIAS_STEP) * _BIAS_STEP
        ids = np.full((len(step.sampled), width), _PADDING, dtype=np.int64)
        values = np.zeros(ids.shape, dtype=np.float32)
        for row, biases in by_row.items():
            ids[row, : len(biases)] = list(biases)
            values[row, : len(biases)] = list(biases.values())
        return self._staging.put("bias_ids", ids), self._staging.put("biases", values)

    def _launch_prompts(
        self, logits: torch.Tensor, prompt_rows: list[PromptRows]
    ) -> list[tuple[PromptRows, HostScores]]:
        """Of the model's own distribution: no bias, no penalty."""
        if not prompt_rows:
            return []
        ids = np.concatenate(
            [r.sequence.token_ids[r.first_token : r.first_token + r.count] for r in prompt_rows]
        )
        on_device = self._staging.put("prompt_ids", ids)
        launched: list[tuple[PromptRows, HostScores]] = []
        start = 0
        for rows in prompt_rows:
            end = start + rows.count
            found = self._kernels.describe_tokens(
                logits[rows.first_row : rows.first_row + rows.count],
                on_device[start:end],
                rows.sequence.request.sampling.prompt_logprobs or 0,
            )
            launched.append((rows, self._own_scores(ids[start:end], found)))
            start = end
        return launched

    def _own_scores(self, token_ids: NDArray[np.int64], found: TokenScores) -> HostScores:
        send = self._readback.send
        return HostScores(
            token_ids,
            send(found.logprobs),
            send(found.ranks),
            send(found.top_ids),
            send(found.top_logprobs),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """What stays the same while the same sequences are sampled."""

    sampled: list[Sequence]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalties: Penalties | None
    random_rows: list[int]
    biased_rows: list[int]  # with a bias, or with stop tokens to hold back at first
    num_top: int | None  # alternatives of the row that wants most; None = no log-probabilities


def _nothing(
    device: torch.device, prompt_scores: list[tuple[PromptRows, HostScores]]
) -> PendingTokens:
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    none = np.zeros(0, dtype=np.int64)
    return PendingTokens(ids, [], none, none, None, prompt_scores)


def _may_bias(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or (sampling.min_tokens and sampling.stop_token_ids))


def _summed(sampling: SamplingParams) -> dict[int, float]:
    """Biases by token, of which a request may name one twice."""
    biases: dict[int, float] = {}
    for token_id, bias in sampling.logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    return biases
