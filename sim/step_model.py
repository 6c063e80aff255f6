"""How long a step of a simulated instance takes.

The closed form is DistServe's (OSDI 2024, §4 and its simulator's profiles), with a prompt's
attention as pairs of positions::

    prefill(u, c) = prefill_base + prefill_token·u + prefill_pair·(u·c + u²/2)
    decode(b, K)  = base + seq·b + context·K         two pieces, by the size b of the batch

A step that does both reads the weights once, so it pays the larger of the two bases once. Times are
milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.common.cluster import LatencyModel

NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class DecodeLine:
    base: float
    seq: float
    context: float

    def scaled(self, factor: float) -> DecodeLine:
        return DecodeLine(self.base * factor, self.seq * factor, self.context * factor)


@dataclass(frozen=True, slots=True)
class StepModel:
    """``large`` holds from a batch of ``large_batch`` sequences on."""

    prefill_base: float
    prefill_token: float
    prefill_pair: float
    decode: DecodeLine
    large: DecodeLine | None = None
    large_batch: int = NO_LIMIT

    @classmethod
    def of(cls, latency: LatencyModel) -> StepModel:
        small = DecodeLine(latency.decode_base, latency.decode_seq, latency.decode_context)
        large = DecodeLine(latency.large_base, latency.large_seq, latency.large_context)
        has_large = latency.large_batch > 0
        return cls(
            latency.prefill_base,
            latency.prefill_token,
            latency.prefill_pair,
            small,
            large if has_large else None,
            latency.large_batch if has_large else NO_LIMIT,
        )

    @classmethod
    def from_coefficients(
        cls,
        *,
        prefill_base: float,
        prefill_token: float,
        prefill_pair: float,
        decode_base: float,
        decode_seq: float,
        decode_context: float,
    ) -> StepModel:
        line = DecodeLine(decode_base, decode_seq, decode_context)
        return cls(prefill_base, prefill_token, prefill_pair, line)

    def scaled(self, factor: float) -> StepModel:
        """Every time ``factor`` times as long."""
        return StepModel(
            self.prefill_base * factor,
            self.prefill_token * factor,
            self.prefill_pair * factor,
            self.decode.scaled(factor),
            self.large.scaled(factor) if self.large is not None else None,
            self.large_batch,
        )

    def as_latency(self) -> LatencyModel:
        """What an instance would tell a router of itself."""
        large = self.large or DecodeLine(0.0, 0.0, 0.0)
        return LatencyModel(
            prefill_base=self.prefill_base,
            prefill_token=self.prefill_token,
            prefill_pair=self.prefill_pair,
            decode_base=self.decode.base,
            decode_seq=self.decode.seq,
            decode_context=self.decode.context,
            large_batch=self.large_batch if self.large is not None else 0,
            large_base=large.base,
            large_seq=large.seq,
            large_context=large.context,
        )

    def chunk_ms(self, uncached: int, computed: int) -> float:
        """Prompt tokens ``computed … computed + uncached``, without the base."""
        pairs = uncached * (computed + uncached / 2)
        return self.prefill_token * uncached + self.prefill_pair * pairs

    def prefill_ms(self, uncached: int, computed: int = 0) -> float:
        return self.prefill_base + self.chunk_ms(uncached, computed)

    def line(self, num_seqs: int) -> DecodeLine:
        if self.large is not None and num_seqs >= self.large_batch:
            return self.large
        return self.decode

    def decode_ms(self, num_seqs: int, context_tokens: int) -> float:
        line = self.line(num_seqs)
        return line.base + line.seq * num_seqs + line.context * context_tokens

    def mixed_ms(self, chunks_ms: float, num_seqs: int, context_tokens: int) -> float:
        """A step of chunks (``chunk_ms`` of each, summed) beside decodes."""
        if not num_seqs:
            return self.prefill_base + chunks_ms
        line = self.line(num_seqs)
        base = max(self.prefill_base, line.base)
        return base + chunks_ms + line.seq * num_seqs + line.context * context_tokens


@dataclass(frozen=True, slots=True)
class Leap:
    """Decode steps of an unchanging batch, in closed form: every step is longer than the one before
    by what ``num_seqs`` more context tokens cost."""

    first_ms: float
    growth_ms: float

    @classmethod
    def of(cls, model: StepModel, num_seqs: int, context_tokens: int, factor: float) -> Leap:
        growth = model.line(num_seqs).context * num_seqs
        return cls(model.decode_ms(num_seqs, context_tokens) * factor, growth * factor)

    def after_ms(self, num_steps: int) -> float:
        """When ``num_steps`` steps are done, counted from the start of the first."""
        return num_steps * self.first_ms + self.growth_ms * num_steps * (num_steps - 1) / 2

    def steps_until(self, elapsed_ms: float) -> int:
        """Steps that have begun before ``elapsed_ms``, the first one in any case."""
        if self.growth_ms < 1e-12:
            steps = math.ceil(elapsed_ms / self.first_ms)
        else:
            linear = self.first_ms - self.growth_ms / 2
            root = math.sqrt(linear * linear + 2 * self.growth_ms * elapsed_ms)
            steps = math.ceil((root - linear) / self.growth_ms)
        steps = max(1, steps)
        after_ms = self.after_ms
        while steps > 1 and after_ms(steps - 1) >= elapsed_ms:  # rounding
            steps -= 1
        while after_ms(steps) < elapsed_ms:
            steps += 1
        return steps
