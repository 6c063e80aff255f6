"""Entry point of a decode or mixed instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import grpc.aio

from isthmus.common.cluster import Role
from isthmus.decode_worker.service import SERVICE_NAME, DecodeServicer
from isthmus.decode_worker.worker import DecodeWorker
from isthmus.protos.v1 import decode_pb2_grpc
from isthmus.worker import entry
from isthmus.worker.process import RoleParts, pool_of
from isthmus.worker.role import WorkerRuntime

# Requests that may wait for blocks, as a multiple of those that may run.
_LINE_FACTOR = 4


def build_role(runtime: WorkerRuntime, server: grpc.aio.Server) -> RoleParts:
    max_waiting = _LINE_FACTOR * pool_of(runtime.args).engine.max_num_seqs
    worker = DecodeWorker(runtime, max_waiting)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
    return RoleParts(worker, SERVICE_NAME)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    entry.main([Role.DECODE, Role.MIXED], build_role, argv)


if __name__ == "__main__":
    main()
