"""Where a decoder's ranks meet: after the embedding, around the projections back, at the logits.

Between these points a rank works on its own heads and its own part of the inner width; what it
needs whole (the residual stream, norms) every rank has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isthmus.engine.models.shard import Parts, Shard, Split
from isthmus.engine.tp_group import TpGroup
from isthmus.kernels import Kernels, PackedLinear


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank's view of the group. With a single rank every method is its plain product."""

    group: TpGroup
    shard: Shard
    split: Split

    @property
    def is_whole(self) -> bool:
        return self.shard.size == 1

    def embed(
        self, input_ids: torch.Tensor, embedding: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """input_ids int64 [T], embedding [V of the rank, E] → [T, E] in ``dtype`` on every rank."""
        if self.is_whole:
            return torch.nn.functional.embedding(input_ids, embedding).to(dtype)
        own = self.shard.own(self.shard.vocab)
        is_mine = (input_ids >= own.start) & (input_ids < own.stop)
        rows = torch.nn.functional.embedding(
            (input_ids - own.start).clamp(0, len(own) - 1), embedding
        )
        # Exact in any order: all terms of a row but one are zero.
        return self.group.sum(rows.masked_fill(~is_mine.unsqueeze(1), 0.0).to(dtype))

    def project_heads(
        self, kernels: Kernels, attended: torch.Tensor, output: PackedLinear, head_dim: int
    ) -> torch.Tensor:
        """attended [T, H of the rank · D] → [T, E] on every rank."""
        return self._project(kernels, attended, output, self.shard.query_heads, head_dim)

    def project_ffn(
        self, kernels: Kernels, activated: torch.Tensor, down: PackedLinear
    ) -> torch.Tensor:
        """activated [T, F of the rank] → [T, E] on every rank."""
        return self._project(kernels, activated, down, self.shard.ffn, 1)

    def logits(self, kernels: Kernels, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
        """x [K, E] → float32 [K, V] on the leader; the rank's part on others.

        Afterwards every rank has written the KV of the batch, also when K is 0 and nothing of the
        last layer was exchanged: the leader may have it sent away."""
        own = kernels.linear(x, head).float()
        if self.is_whole:
            return own
        if not len(x):
            self.group.meet(x.device)
        return self.group.join_on_leader(own, _widths(self.shard.vocab))

    def _project(
        self,
        kernels: Kernels,
        x: torch.Tensor,
        packed: PackedLinear,
        parts: Parts,
        width: int,
    ) -> torch.Tensor:
        if self.is_whole:
            return kernels.linear(x, packed)
        if self.split is Split.INPUT:
            return self.group.sum(kernels.linear(x, packed))
        whole = self.group.join(x, _widths(parts, width))
        return self.group.join(kernels.linear(whole, packed), _widths(self.shard.hidden))


def _widths(parts: Parts, width: int = 1) -> list[int]:
    return [len(part) * width for part in parts]
