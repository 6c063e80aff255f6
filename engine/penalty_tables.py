"""How often each running sequence has each token, counted where tokens are drawn.

Presence, frequency and repetition penalties look at all tokens so far, and the newest may not be
known to the host when the next step is launched. So a sequence with a penalty has a row of these
tables from its first sampled token on: filled from the tokens known then, counted up by every draw.

::

    rows 0 … max_seqs − 1   sequences with a penalty; kept while they run
    row max_seqs            all sequences without one, whose counts nobody looks at
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.common.types import SamplingParams
from isthmus.engine.batch import StepInput
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.staging import Buffer, Staging
from isthmus.kernels.types import Penalties


def has_penalty(sampling: SamplingParams) -> bool:
    return bool(
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    )


class PenaltyTables:
    """Owned by the sampler; the engine thread alone touches it."""

    def __init__(self, torch_device: torch.device, max_seqs: int, vocab_size: int) -> None:
        shape = (max_seqs + 1, vocab_size)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=torch_device)
        self._is_in_prompt = torch.zeros(shape, dtype=torch.bool, device=torch_device)
        self.vocab_size = vocab_size
        self._unpenalised_row = max_seqs
        self._rows: dict[Sequence, int] = {}

    @staticmethod
    def input_buffers(max_seqs: int) -> dict[str, Buffer]:
        return {
            "table_rows": Buffer(max_seqs, torch.int64),
            "repetition": Buffer(max_seqs, torch.float32),
            "presence": Buffer(max_seqs, torch.float32),
            "frequency": Buffer(max_seqs, torch.float32),
            "known_tokens": Buffer(max_seqs, torch.int64),
        }

    def stage(self, step: StepInput, staging: Staging) -> Penalties | None:
        """The penalties of the sequences that get a token; None where nobody has one."""
        params = [sequence.request.sampling for sequence in step.sampled]
        penalised = [s for s, p in zip(step.sampled, params, strict=True) if has_penalty(p)]
        if not penalised:
            return None
        newcomers = [sequence for sequence in penalised if sequence not in self._rows]
        if newcomers:
            self._give_rows(newcomers)
            self._fill_rows(newcomers, staging)
        rows = [self._rows.get(sequence, self._unpenalised_row) for sequence in step.sampled]
        return Penalties(
            output_counts=self._counts,
            is_in_prompt=self._is_in_prompt,
            table_rows=staging.put("table_rows", np.array(rows, dtype=np.int64)),
            repetition=staging.put("repetition", _floats([p.repetition_penalty for p in params])),
            presence=staging.put("presence", _floats([p.presence_penalty for p in params])),
            frequency=staging.put("frequency", _floats([p.frequency_penalty for p in params])),
        )

    def count(self, penalties: Penalties, token_ids: torch.Tensor) -> None:
        """Counts a drawn token, int64 [K], for every row."""
        cells = penalties.table_rows * self.vocab_size + token_ids
        ones = torch.ones_like(cells, dtype=torch.int32)
        self._counts.view(-1).scatter_add_(0, cells, ones)

    def _give_rows(self, newcomers: list[Sequence]) -> None:
        """At most ``max_seqs`` sequences run, so those who do not make room for those who do."""
        running = {s: row for s, row in self._rows.items() if s.status is SeqStatus.RUNNING}
        free = set(range(self._unpenalised_row)) - set(running.values())
        self._rows = running | {sequence: free.pop() for sequence in newcomers}

    def _fill_rows(self, newcomers: list[Sequence], staging: Staging) -> None:
        """Their tokens are all known: nothing of a newcomer was sampled by a step in flight."""
        tokens = np.concatenate([sequence.token_ids for sequence in newcomers])
        on_device = staging.put("known_tokens", tokens)
        start = 0
        for sequence in newcomers:
            row, num_prompt = self._rows[sequence], sequence.request.num_prompt_tokens
            known = on_device[start : start + sequence.num_tokens]
            start += sequence.num_tokens
            outputs = known[num_prompt:]
            self._is_in_prompt[row].zero_().index_fill_(0, known[:num_prompt], True)
            ones = torch.ones_like(outputs, dtype=torch.int32)
            self._counts[row].zero_().scatter_add_(0, outputs, ones)


def _floats(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)
