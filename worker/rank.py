"""A follower: one rank of an instance that is not its leader.

It connects to the leader that started it, loads its part of the model, and from then on runs every
step that the leader tells it; a thread of its own moves KV from and to its store as the leader's
transfers say. It has no server, no requests and no registration; its life is its leader's: it ends
when the leader says so, and at once when the leader is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

import msgspec

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError, ErrorDetail, InternalError, IsthmusError, ModelError
from isthmus.common.logging import configure_logging, get_logger
from isthmus.engine.kv_store import KvStore, is_shared, layout_of
from isthmus.engine.models.loader import load_model
from isthmus.engine.tp_group import join_store, open_group
from isthmus.engine.tp_steps import Follower, common_num_blocks
from isthmus.worker.lifecycle import ExitCode
from isthmus.worker.pool import prepare_process
from isthmus.worker.rank_launcher import INVITATION_VARIABLE
from isthmus.worker.rank_link import (
    FrameKind,
    Hello,
    Invitation,
    Outcome,
    RankLink,
    Setup,
    connect,
    wait_for_end,
)
from isthmus.worker.transfers import serve_transfers, staging_bytes_of

CONNECT_TIMEOUT_S = 10.0
_LAST_WORDS_S = 2.0  # for a stop that came just before the end of the connection
_PR_SET_PDEATHSIG = 1

log = get_logger("rank")


def run_rank(invitation: Invitation) -> ExitCode:
    """Runs until the leader says stop. Never raises; the leader hears why a start failed."""
    try:
        link = connect(invitation, CONNECT_TIMEOUT_S)
    except IsthmusError as error:
        log.error("no leader", rank=invitation.rank, problem=error.message)
        return ExitCode.FAULT
    try:
        return _follow(link, invitation)
    except (ModelError, ConfigError) as error:
        _tell_failure(link, error)
        return ExitCode.CONFIG
    except IsthmusError as error:
        log.error("rank failed", stage=error.stage, problem=error.message)
        _tell_failure(link, error)
        return ExitCode.FAULT
    except Exception as error:
        log.exception("rank failed")
        _tell_failure(link, InternalError(f"{type(error).__name__}: {error}", stage="rank"))
        return ExitCode.FAULT
    finally:
        link.close()


def _follow(link: RankLink, invitation: Invitation) -> ExitCode:
    hello = Hello(invitation.rank, os.getpid(), invitation.token)
    link.send_message(hello)
    transfers = connect(invitation, CONNECT_TIMEOUT_S)
    transfers.send_message(msgspec.structs.replace(hello, is_for_transfers=True))
    # It comes when the slowest of all ranks is there. The leader has a deadline for that, and at it
    # closes the connection.
    link.set_timeout(None)
    setup = link.receive_message(Setup)
    threading.Thread(target=_end_with_leader, args=(link,), name="leader", daemon=True).start()
    config = ClusterConfig.model_validate_json(setup.config_json)
    configure_logging(
        config.logging, role=setup.role, instance=setup.instance_id, rank=str(invitation.rank)
    )
    follower, store = _load(config, Role(setup.role), invitation, setup.store_port)
    threading.Thread(
        target=serve_transfers,
        args=(transfers.detach(), config.transfer, store),
        name="transfers",
        daemon=True,
    ).start()
    link.send_message(Outcome(weight_bytes=follower.weight_bytes))
    while True:
        kind, payload = link.receive()
        if kind is FrameKind.STOP:
            return ExitCode.OK
        follower.run(payload)


def _load(
    config: ClusterConfig, role: Role, invitation: Invitation, store_port: int
) -> tuple[Follower, KvStore]:
    pool = config.pool(role)
    engine, device = pool.engine, invitation.device
    prepare_process(pool, invitation.rank)
    start_s = config.lifecycle.ready_timeout_ms / 1000
    store = join_store(invitation.host, store_port, engine.tp_size, start_s)
    group = open_group(
        store,
        invitation.rank,
        engine.tp_size,
        device=device,
        host=invitation.host,
        timeout_s=start_s,
    )
    model = load_model(
        config.model, device, engine.num_threads, group, kernels_by_op=engine.kernels
    )
    num_blocks = common_num_blocks(engine, model.spec, group)
    layout = layout_of(model.spec, engine.block_size, engine.kv_dtype)
    staging_bytes = staging_bytes_of(config, role)
    kv_store = KvStore(layout, num_blocks, device, is_shared(engine), staging_bytes)
    group.set_timeout(engine.tp_timeout_ms / 1000)
    return Follower(model, kv_store, device), kv_store


def _tell_failure(link: RankLink, error: IsthmusError) -> None:
    try:
        link.send_message(Outcome(ErrorDetail.of(error)))
    except IsthmusError:
        log.debug("the leader is gone already")


def _end_with_leader(link: RankLink) -> None:
    """A collective on a device may wait long for a leader that is gone."""
    wait_for_end(link)
    threading.Event().wait(_LAST_WORDS_S)
    os._exit(ExitCode.FAULT)


def main() -> NoReturn:
    """A follower as a child of its leader's process."""
    invitation = msgspec.json.decode(os.environ[INVITATION_VARIABLE], type=Invitation)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A Ctrl-C at the terminal, or a stop of the whole group, is the leader's to deal with.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = run_rank(invitation)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # native threads must not hold up the end


if __name__ == "__main__":
    main()
