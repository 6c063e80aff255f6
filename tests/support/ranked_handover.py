"""Prefill and decode engines of several ranks in one process, with transfers between their stores.

A rank is a thread over gloo with a KV store and a connector of its own; the engine, the manager and
the sessions are the real ones. Nothing runs by itself: ``hand_over`` steps the engines and sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from isthmus.common.clock import NS_PER_S, SystemClock
from isthmus.common.config import EngineConfig, ModelConfig, TransferConfig
from isthmus.common.ids import InstanceId, new_transfer_id
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef, Request
from isthmus.engine.core import EngineCore
from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.types import SequenceMode
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.rank_port import LocalPort
from isthmus.kvtransfer.receive_session import ReceiveState
from isthmus.prefill_worker.chunk_feed import ChunkFeed, LayerSteps
from tests.support.engine_driver import Driver
from tests.support.tp_ranks import RankedModel, load_ranks, tp_groups

CONFIG = TransferConfig(connector="local", checksum="xxh3")
MAX_SWEEPS = 100


class RankedInstance:
    """One engine over ``tp_size`` ranks; ``manager`` drives their stores."""

    def __init__(
        self, name: str, model: RankedModel, config: EngineConfig, fabric: LocalFabric
    ) -> None:
        self.ref = InstanceRef(InstanceId(name), 1, "127.0.0.1:1")
        self.core = EngineCore(model, config, SystemClock())
        stores = [
            KvStore(layout_of(rank.spec, config.block_size), self.core.num_blocks, "cpu")
            for rank in model.models
        ]
        model.kv_of[:] = [store.tensor for store in stores]
        self.ports = [self._port(store, fabric) for store in stores]
        self.manager = TransferManager(self.ref, self.ports, CONFIG, SystemClock())
        self.stores = stores

    def _port(self, store: KvStore, fabric: LocalFabric) -> LocalPort:
        return LocalPort(
            store.layout,
            MemoryRegion(store.base_address, store.num_bytes),
            store.num_blocks,
            (LocalConnector(f"{self.ref.instance_id}/{store.layout.tp_rank}", fabric),),
            CONFIG,
            SystemClock(),
        )

    @property
    def layouts(self) -> list[KvLayout]:
        return [store.layout for store in self.stores]


@contextmanager
def ranked_instances(
    model: ModelConfig, specs: Sequence[tuple[str, int, EngineConfig]]
) -> Iterator[dict[tuple[str, int], RankedInstance]]:
    """By name and number of ranks. Close their managers on the event loop that uses them."""
    fabric = LocalFabric()
    with ExitStack() as stack:
        made = {}
        for name, size, config in specs:
            if size == 1:
                single: LanguageModel = load_model(model, "cpu", 1)
                ranks = RankedModel([single])
            else:
                ranks = load_ranks(model, stack.enter_context(tp_groups(size)))
            made[name, size] = RankedInstance(f"{name}-{size}", ranks, config, fabric)
        yield made
        for instance in made.values():
            instance.core.close()


async def hand_over(
    source: RankedInstance, target: RankedInstance, request: Request
) -> tuple[list[int], int]:
    """Computes the prompt at ``source``, decodes at ``target``: the tokens, and the bytes moved."""
    if not target.manager.knows(source.ref):
        answer = await source.manager.answer(target.manager.offer())
        await target.manager.complete(answer)
    reservation = target.core.reserve(request)
    ticket = TransferTicket(
        transfer_id=new_transfer_id(),
        request_id=request.request_id,
        source=source.ref,
        target=target.ref,
        first_block=len(reservation.cached_block_ids),
        target_block_ids=reservation.block_ids,
        num_tokens=len(request.token_ids),
        layout_hash=target.core.kv_layout.compat_hash,
        deadline_ns=SystemClock().now_ns() + 60 * NS_PER_S,
        checksum=target.manager.checksum_with(source.ref),
    )
    receive = target.manager.open_receive(ticket)
    send = source.manager.open_send(ticket)
    layout = send.target_layout
    layers = LayerSteps(layout.num_layers, layout.layer_bytes)
    feed = ChunkFeed(ticket.num_tokens, layout.block_size, ticket.first_block, layers)
    source.core.add(request, SequenceMode.PREFILL_ONLY)
    first_token: int | None = None
    while (output := source.core.step()) is not None:
        for update in output.updates:
            first_token = update.token_ids[0] if update.token_ids else first_token
            for piece in feed.land(update.num_computed_tokens):
                table = source.core.block_table(request.request_id)
                first, stop = (index - ticket.first_block for index in (piece.first, piece.stop))
                own = send.source_blocks(first, stop)
                send.push(first, table[own.start : own.stop], piece.is_last, stop - first)
            await source.manager.sweep_once()  # while the next chunk is still to be computed
    for _ in range(MAX_SWEEPS):
        await source.manager.sweep_once()
        await target.manager.sweep_once()
        if not (receive.is_open or send.is_open):
            break
    await receive.wait_complete()
    await send.drained()
    assert receive.state is ReceiveState.COMPLETE
    source.core.release_hold(request.request_id)
    assert first_token is not None
    target.core.admit_with_kv(reservation, request, first_token)
    outcome = Driver(target.core).run()[request.request_id]
    for instance in (source, target):
        instance.core.check_integrity()
        instance.manager.check_integrity()
        load = instance.core.load()
        assert load.free_blocks == load.num_blocks
    return [first_token, *outcome.token_ids], receive.num_bytes


def salted(request: Request, salt: str) -> Request:
    """The same request where nobody has seen its like."""
    name = type(request.request_id)(f"{request.request_id} {salt}")
    return replace(request, request_id=name, cache_salt=salt)
