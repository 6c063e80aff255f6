"""Entry point of a prefill instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import grpc.aio

from isthmus.common.cluster import Role
from isthmus.prefill_worker.service import SERVICE_NAME, PrefillServicer
from isthmus.prefill_worker.worker import PrefillWorker
from isthmus.protos.v1 import prefill_pb2_grpc
from isthmus.worker import entry
from isthmus.worker.process import RoleParts
from isthmus.worker.role import WorkerRuntime


def build_role(runtime: WorkerRuntime, server: grpc.aio.Server) -> RoleParts:
    worker = PrefillWorker(runtime)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)
    return RoleParts(worker, SERVICE_NAME)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    entry.main([Role.PREFILL], build_role, argv)


if __name__ == "__main__":
    main()
