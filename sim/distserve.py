"""An instance that makes its batches as DistServe's simulator does, to be held against it.

Written after the behaviour of ``simdistserve`` (Zhong et al., OSDI 2024; github.com/LLMServe/
DistServe): whole prompts, as many as wait, come before any decode step; a decode step takes
sequences from the head of its line as long as their tokens together stay within a limit, and puts
them back at its end. Blocks are not modelled there, so they are not here: whoever asks gets room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import LoadReport
from isthmus.sim.events import EventQueue
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.listener import Listener
from isthmus.sim.sequence import SeqState, SimSequence
from isthmus.sim.spec import InstanceSpec

MAX_DECODE_TOKENS = 50_000  # of one decode step


class PromptsFirstInstance:
    """The interface of ``Instance``."""

    def __init__(
        self,
        spec: InstanceSpec,
        queue: EventQueue,
        listener: Listener,
        noise: Callable[[], float] | None = None,
    ) -> None:
        self.spec = spec
        self.epoch = 1
        self.slowness = 1.0
        self.pool = KvPool(spec.num_blocks, spec.block_size)
        self.busy_ns = 0
        self.num_steps = 0
        self.num_preempted = 0
        self._queue = queue
        self._listener = listener
        self._noise = noise
        self._prompts: deque[SimSequence] = deque()
        self._decodes: deque[SimSequence] = deque()
        self._kept: dict[SimSequence, None] = {}
        self._batch: list[SimSequence] = []
        self._plan_no = 0
        self._ends_ns = 0
        self._step_ms = 0.0
        self._report_no = 0

    @property
    def num_sequences(self) -> int:
        return len(self._prompts) + len(self._decodes) + len(self._kept) + len(self._batch)

    @property
    def num_prompts(self) -> int:
        running = sum(s.state is not SeqState.DECODING for s in (*self._batch, *self._decodes))
        return len(self._prompts) + running

    def submit(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        sequence.move_to(SeqState.WAITING)
        sequence.added_ns = self._queue.now_ns
        self._prompts.append(sequence)
        self._step()
        self._listener.load_changed(self)

    def fetch_prefix(self, sequence: SimSequence, num_held: int) -> int:  # noqa: ARG002
        """Nothing: blocks are not modelled."""
        return 0

    def prefix_ended(self, sequence: SimSequence, *, has_arrived: bool) -> None:
        raise AssertionError(f"{sequence} waits for no prefix, arrived or not ({has_arrived})")

    def reserve(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        sequence.move_to(SeqState.RESERVING)
        sequence.move_to(SeqState.RESERVED)
        self._kept[sequence] = None
        self._listener.reserved(sequence)

    def arrived(self, sequence: SimSequence, first_ns: int) -> None:
        self._listener.before_change(self)
        del self._kept[sequence]
        sequence.take_first_token(first_ns)
        sequence.move_to(SeqState.ARRIVED)
        sequence.move_to(SeqState.DECODING)
        self._decodes.append(sequence)
        self._step()
        self._listener.load_changed(self)

    def let_go(self, sequence: SimSequence) -> None:
        self._listener.before_change(self)
        del self._kept[sequence]
        sequence.move_to(SeqState.ENDED)

    def abort(self, sequence: SimSequence) -> None:
        """One in the batch is dropped when its step ends."""
        if sequence.state is SeqState.ENDED:
            return
        self._listener.before_change(self)
        sequence.move_to(SeqState.ENDED)
        self._kept.pop(sequence, None)
        for line in (self._prompts, self._decodes):
            if sequence in line:
                line.remove(sequence)

    def kill(self) -> list[SimSequence]:
        everybody = [*self._batch, *self._decodes, *self._kept, *self._prompts]
        lost = [sequence for sequence in everybody if sequence.state is not SeqState.ENDED]
        for sequence in lost:
            sequence.move_to(SeqState.ENDED)
        if self._batch:
            self.busy_ns -= self._ends_ns - self._queue.now_ns
        self._plan_no += 1
        self._batch = []
        self._kept.clear()
        self._prompts.clear()
        self._decodes.clear()
        return lost

    def report(self, at_ns: int) -> LoadReport:
        self._report_no += 1
        running = [*self._batch, *self._decodes]
        decoding = [s for s in running if s.state is SeqState.DECODING]
        oldest_ns = self._prompts[0].added_ns if self._prompts else at_ns
        return LoadReport(
            instance_id=self.spec.instance_id,
            epoch=self.epoch,
            seq=self._report_no,
            at_ns=at_ns,
            waiting_seqs=len(self._prompts),
            waiting_tokens=sum(s.num_prompt for s in self._prompts),
            oldest_wait_ms=(at_ns - oldest_ns) / NS_PER_MS,
            running_seqs=len(running),
            running_context_tokens=sum(s.num_tokens for s in decoding),
            num_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_blocks,
            step_ms=self._step_ms,
            steps=self.num_steps,
            prompt_seqs=self.num_prompts,
        )

    def check_integrity(self) -> None:
        """Nothing is counted that could disagree."""
        self.pool.check_integrity()

    def _step(self) -> None:
        if self._batch:
            return
        model = self.spec.model
        if self._prompts:
            self._batch = self._take_prompts()
            step_ms = model.prefill_base + sum(model.chunk_ms(s.num_tokens, 0) for s in self._batch)
        elif self._decodes:
            self._batch = self._take_decodes()
            step_ms = model.decode_ms(len(self._batch), sum(s.num_tokens for s in self._batch))
        else:
            return
        step_ms *= self.slowness * (self._noise() if self._noise is not None else 1.0)
        self._step_ms = step_ms
        self._plan_no += 1
        self._ends_ns = self._queue.now_ns + max(1, round(step_ms * NS_PER_MS))
        self.busy_ns += self._ends_ns - self._queue.now_ns
        self._queue.at(self._ends_ns, self._ended, self._plan_no)
        for sequence in self._batch:
            if sequence.state is SeqState.DECODING and sequence.num_generated == 1:
                self._listener.second_token(sequence, self._ends_ns)

    def _take_prompts(self) -> list[SimSequence]:
        taken: list[SimSequence] = []
        budget = self.spec.max_num_batched_tokens
        while self._prompts and (self._prompts[0].num_tokens <= budget or not taken):
            sequence = self._prompts.popleft()
            sequence.move_to(SeqState.PREFILLING)
            sequence.started_ns = self._queue.now_ns
            budget -= sequence.num_tokens
            taken.append(sequence)
        return taken

    def _take_decodes(self) -> list[SimSequence]:
        taken: list[SimSequence] = []
        budget = MAX_DECODE_TOKENS
        while self._decodes and (self._decodes[0].num_tokens <= budget or not taken):
            budget -= self._decodes[0].num_tokens
            taken.append(self._decodes.popleft())
        return taken

    def _ended(self, plan_no: int) -> None:
        if plan_no != self._plan_no:
            return
        self._listener.before_change(self)
        batch, self._batch = self._batch, []
        self.num_steps += 1
        for sequence in batch:
            if sequence.state is SeqState.PREFILLING:
                self._computed(sequence)
            elif sequence.state is SeqState.DECODING:
                sequence.num_generated += 1
                self._go_on(sequence)
        self._step()
        self._listener.load_changed(self)

    def _computed(self, sequence: SimSequence) -> None:
        sequence.num_computed = sequence.num_tokens
        sequence.num_generated += 1
        if sequence.is_for_peer:
            sequence.move_to(SeqState.HELD)
            self._kept[sequence] = None
            self._listener.sampled(sequence)
            return
        self._listener.sampled(sequence)
        if sequence.state is SeqState.PREFILLING:
            sequence.move_to(SeqState.DECODING)
            self._go_on(sequence)

    def _go_on(self, sequence: SimSequence) -> None:
        if sequence.num_generated >= sequence.num_output:
            sequence.move_to(SeqState.ENDED)
            self._listener.finished(sequence)
        else:
            self._decodes.append(sequence)
