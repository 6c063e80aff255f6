"""Runs steps on a device that works behind the host: ``launch`` only enqueues.

::

    launch n    build, stage │ unknown tokens ← sampled by n − 1 │ replay or forward │ sample
    wait n      the tokens of n are in pinned memory

The ids that a step samples stay on the device, where the next step takes its unknown inputs from;
the host reads them while that one runs. Nothing in a launch waits for the device, and all work is
in one queue: a block that a later step gets is written after the last write of an earlier one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from isthmus.common.config import EngineConfig
from isthmus.common.layer_progress import LayerMarks, LayerProgress
from isthmus.engine.batch import StepInput, build_step_input
from isthmus.engine.cuda_graphs import (
    DecodeGraphs,
    bucket_of,
    decode_buckets,
    empty_decode,
    pad_decode,
)
from isthmus.engine.device import Device
from isthmus.engine.device_sampler import DeviceSampler, PendingTokens
from isthmus.engine.kv_store import KvStore
from isthmus.engine.layer_events import LayerEvents
from isthmus.engine.models.types import ForwardBatch, LanguageModel
from isthmus.engine.penalty_tables import PenaltyTables
from isthmus.engine.runner import LaunchedStep, StepTokens
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.staging import Buffer, Readback, Staging
from isthmus.kernels import Kernels


class DeviceRunner:
    """A ``Runner``. Captures its graphs at construction, so it takes the store's memory after."""

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        kv_store: KvStore,
        config: EngineConfig,
        max_model_len: int,
        device: Device,
    ) -> None:
        self._model = model
        self._kv_store = kv_store
        self._device = device
        self._block_size = kv_store.layout.block_size
        max_seqs, max_blocks = config.max_num_seqs, -(-max_model_len // self._block_size)
        max_rows = max(config.max_num_batched_tokens, max_seqs)
        self._max_model_len = max_model_len
        inputs = _input_buffers(max_rows, max_seqs, max_blocks)
        sampling = DeviceSampler.input_buffers(max_seqs, max_rows)
        on = device.torch_device
        self._staging = Staging(device, inputs | sampling)
        self._readback = Readback(device, DeviceSampler.result_buffers(max_seqs))
        tables = PenaltyTables(on, max_seqs, model.spec.vocab_size)
        self._sampler = DeviceSampler(kernels, self._staging, self._readback, tables)
        self._tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=on)
        self._sampled_ids = torch.zeros(max_seqs, dtype=torch.int64, device=on)  # by the last step
        self._sampled_before: dict[Sequence, int] = {}  # the row of each in these
        buckets = decode_buckets(max_seqs) if config.cuda_graphs else ()
        with device.active(), torch.inference_mode():
            self.graphs = DecodeGraphs(
                device, buckets, model.spec.vocab_size, self._forward, self.stage_padding
            )

    def launch(self, plan: StepPlan, *, is_watched: bool = False) -> LaunchedStep:
        layers = LayerEvents(self._device) if is_watched else None
        with self._device.active(), torch.inference_mode():
            step = build_step_input(plan, self._block_size, self._sampled_before)
            self._staging.begin()
            turn = self._readback.begin()
            try:
                pending = self._sampler.launch(self._logits(step, layers), step)
                self._staging.end()
                self._readback.end()
                self._sampled_ids[: len(step.sampled)].copy_(pending.token_ids)
            except Exception:
                # What is launched already may still write to blocks that are about to be free.
                self._wait_for_device()
                raise
        self._sampled_before = {sequence: row for row, sequence in enumerate(step.sampled)}
        num_layers = self._kv_store.layout.num_layers
        return _DeviceStep(self._readback, turn, pending, layers, num_layers)

    def _wait_for_device(self) -> None:
        passed = self._device.event()
        passed.record()
        passed.synchronize()

    def _logits(self, step: StepInput, marks: LayerMarks | None) -> torch.Tensor:
        """Float32 [K, V], or with rows of padding behind."""
        bucket = bucket_of(step, self.graphs.buckets)
        if bucket is None:
            return self._forward(self._staged(step), marks)
        self._staged(pad_decode(step, bucket))
        return self.graphs.replay(bucket)

    def _forward(self, batch: ForwardBatch, marks: LayerMarks | None = None) -> torch.Tensor:
        store = self._kv_store
        return self._model.forward(batch, store.tensor, marks, kv_scales=store.scales)

    def _staged(self, step: StepInput) -> ForwardBatch:
        """The step in the device's buffers, which hold it until the next one."""
        put = self._staging.put
        input_ids = put("input_ids", step.input_ids)
        if step.has_unknown_tokens:
            sources = put("sources", step.sources)
            sampled = self._sampled_ids[sources.clamp(min=0)]
            input_ids.copy_(torch.where(sources >= 0, sampled, input_ids))
        num_sequences, width = step.block_table.shape
        tables = self._tables[:num_sequences]
        tables[:, :width].copy_(put("block_table", step.block_table))
        return ForwardBatch(
            input_ids=input_ids,
            positions=put("positions", step.positions),
            slot_mapping=put("slot_mapping", step.slot_mapping),
            query_start=put("query_start", step.query_start),
            seq_lens=put("seq_lens", step.seq_lens),
            block_table=tables,
            logits_index=put("logits_index", step.logits_index),
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
        )

    def stage_padding(self, bucket: int) -> ForwardBatch:
        """The buffers of a bucket's graph, holding rows of padding: a step of nobody."""
        self._staging.begin()
        batch = self._staged(pad_decode(empty_decode(), bucket))
        self._staging.end()
        return replace(batch, max_seq_len=self._max_model_len)  # a replay may be of any length


class _DeviceStep:
    def __init__(
        self,
        readback: Readback,
        turn: int,
        pending: PendingTokens,
        layers: LayerEvents | None,
        num_layers: int,
    ) -> None:
        self._readback = readback
        self._turn = turn
        self._pending = pending
        self._layers = layers
        self._num_layers = num_layers

    @property
    def progress(self) -> LayerProgress | None:
        return self._layers

    def wait(self) -> StepTokens:
        self._readback.wait(self._turn)
        if self._layers is not None:
            self._layers.land(self._num_layers)
        return self._pending.collect()


def _input_buffers(max_rows: int, max_seqs: int, max_blocks: int) -> dict[str, Buffer]:
    wide = dict.fromkeys(
        ("input_ids", "sources", "positions", "slot_mapping", "logits_index"),
        Buffer(max_rows, torch.int64),
    )
    return wide | {
        "query_start": Buffer(max_seqs + 1, torch.int32),
        "seq_lens": Buffer(max_seqs, torch.int32),
        "block_table": Buffer(max_seqs * max_blocks, torch.int32),
    }
