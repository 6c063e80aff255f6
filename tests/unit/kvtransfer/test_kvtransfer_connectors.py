"""The fake connector's script, the local one's reach, and the registry of names."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from isthmus.common.config import TransferConfig
from isthmus.common.errors import ConfigError, HandshakeError, TransferError
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors import registry
from isthmus.kvtransfer.connectors.fake import FakeConnector, Fault, FaultKind, parse_script
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.interface import CopyOp, MemoryRegion, PeerName, WriteState

ME = InstanceRef(InstanceId("prefill-0"), 4, "127.0.0.1:1")


class Ends:
    def __init__(self, script: str) -> None:
        fabric = LocalFabric()
        self.source_bytes = np.arange(80, dtype=np.uint8)
        self.target_bytes = np.zeros(80, dtype=np.uint8)
        self.source = FakeConnector(LocalConnector("source", fabric), parse_script(script)[1])
        self.target = LocalConnector("target", fabric)
        self.source.register(MemoryRegion(self.source_bytes.ctypes.data, 80))
        region = MemoryRegion(self.target_bytes.ctypes.data, 80)
        self.target.register(region)
        self.peer = self.source.add_peer(self.target.metadata(), region)

    def states(self, polls: int) -> list[WriteState]:
        ops = [CopyOp(0, 0, 8), CopyOp(16, 16, 8)]
        handle = self.source.post_write(self.peer, ops, b"n")
        states = [self.source.poll(handle) for _ in range(polls)]
        if states[-1] is not WriteState.IN_PROGRESS:
            self.source.release(handle)
        return states

    @property
    def landed(self) -> tuple[bool, bool]:
        same = self.target_bytes == self.source_bytes
        return bool(same[1:8].all()), bool(same[16:24].all())

    @property
    def notifications(self) -> list[bytes]:
        return [payload for _, payload in self.target.take_notifications()]


class Named(LocalConnector):
    def __init__(self, name: str) -> None:
        super().__init__(name, LocalFabric())
        self.name = name


BUSY, DONE, FAILED = WriteState.IN_PROGRESS, WriteState.DONE, WriteState.FAILED


@pytest.mark.parametrize(
    ("script", "states", "landed", "notifications"),
    [
        ("", [DONE], (True, True), [b"n"]),
        ("1:fail", [DONE], (True, True), [b"n"]),
        ("0:fail", [FAILED], (True, False), []),
        ("0:drop", [DONE], (True, True), []),
        ("0:duplicate", [DONE], (True, True), [b"n", b"n"]),
        ("0:delay=3", [BUSY, BUSY, DONE], (True, True), [b"n"]),
        ("0:hang", [BUSY, BUSY, BUSY], (False, False), []),
        ("0:corrupt", [DONE], (False, True), [b"n"]),
    ],
)
def test_fault_does_what_its_name_says(
    script: str, states: list[WriteState], landed: tuple[bool, bool], notifications: list[bytes]
) -> None:
    ends = Ends(script)
    assert ends.states(len(states)) == states
    assert ends.landed == landed
    assert ends.notifications == notifications


def test_refused_write_starts_nothing_and_open_ended_faults_go_on() -> None:
    ends = Ends("1+:refuse")
    assert ends.states(1) == [DONE]
    for _ in range(3):
        with pytest.raises(TransferError, match="refused"):
            ends.states(1)


def test_hanging_write_fails_when_its_peer_is_removed() -> None:
    ends = Ends("0:hang")
    handle = ends.source.post_write(ends.peer, [CopyOp(0, 0, 8)], b"n")
    assert ends.source.poll(handle) is BUSY
    ends.source.remove_peer(ends.peer)
    assert ends.source.poll(handle) is FAILED
    ends.source.release(handle)
    ends.source.close()


def test_a_periodic_fault_comes_again() -> None:
    (fault,) = parse_script("2%3:fail")[1]
    assert [write for write in range(10) if fault.hits(write)] == [2, 5, 8]


def test_lone_notifications_are_not_counted_as_writes() -> None:
    ends = Ends("0:refuse")
    ends.source.release(ends.source.post_write(ends.peer, (), b"note"))
    assert ends.notifications == [b"note"]
    with pytest.raises(TransferError):
        ends.states(1)


def test_script_is_read() -> None:
    assert parse_script("nixl| 2:fail, 7+:delay=5") == (
        "nixl",
        (Fault(2, FaultKind.FAIL), Fault(7, FaultKind.DELAY, True, 5)),
    )
    assert parse_script("") == ("local", ())


@pytest.mark.parametrize(
    "script", ["x:fail", "1:explode", "1", "1:delay=soon", "1%0:fail", "teleport|1:fail"]
)
def test_unreadable_script_is_a_configuration_error(script: str) -> None:
    with pytest.raises(ConfigError, match="fault_script"):
        parse_script(script)


def test_registry_names_connectors_after_instance_and_epoch() -> None:
    config = TransferConfig(connector=["local", "fake"], fault_script="0:fail")
    local, fake = create_connectors(config, ME, MemoryRegion(0, 1), 64)
    assert (local.name, fake.name) == ("local", "fake")
    assert msgspec.msgpack.decode(local.metadata())["name"] == "prefill-0@4"


def test_nixl_and_ucx_are_not_both_had_in_one_process() -> None:
    with pytest.raises(ValueError, match="nixl and ucx cannot share a process"):
        TransferConfig(connector=["ucx", "shm", "nixl"])
    code = (
        "import sys, types\n"
        "from isthmus.common.errors import TransferError\n"
        "from isthmus.kvtransfer.connectors.ucx_process import claim\n"
        "claim('ucx')\n"
        "sys.modules['nixl_cu13'] = types.ModuleType('nixl_cu13')\n"
        "claim('nixl')\n"
        "try:\n"
        "    claim('ucx')\n"
        "except TransferError as refused:\n"
        "    sys.exit('nixl_cu13 is loaded already' not in refused.message)\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_missing_ucxx_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.delitem(sys.modules, "nixl_cu13", raising=False)
    for direction in ("TX", "RX"):  # what the attempt sets for its UCX goes again with the test
        monkeypatch.setenv(f"UCX_TCP_{direction}_SEG_SIZE", "256k")
    monkeypatch.setenv("UCX_MEMTYPE_CACHE", "n")
    with pytest.raises(TransferError, match=r"pip install 'isthmus\[ucx\]'"):
        create_connectors(TransferConfig(connector="ucx"), ME, MemoryRegion(0, 1), 64)


@pytest.mark.parametrize(
    ("installed", "offered"),
    [
        ({"nixl_cu13", "ucxx"}, ["nixl", "collective"]),
        ({"ucxx"}, ["ucx", "collective"]),
        (set(), ["collective"]),
    ],
)
def test_auto_takes_ucx_where_nixl_is_not(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], offered: list[str]
) -> None:
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda name: name in installed or None
    )
    for name in ("nixl", "ucx", "collective"):
        monkeypatch.setitem(registry._MAKERS, name, lambda here, name=name: Named(name))
    made = create_connectors(TransferConfig(connector="auto"), ME, MemoryRegion(0, 1), 64)
    assert [connector.name for connector in made] == offered


def test_local_connector_reaches_its_own_process_only() -> None:
    connector = LocalConnector("a", LocalFabric())
    elsewhere = msgspec.msgpack.encode({"pid": os.getpid() + 1, "name": "b"})
    with pytest.raises(HandshakeError, match="own process"):
        connector.add_peer(elsewhere, MemoryRegion(0, 1))


def test_two_open_connectors_of_one_name_are_refused() -> None:
    fabric = LocalFabric()
    first, second = LocalConnector("a", fabric), LocalConnector("a", fabric)
    first.register(MemoryRegion(0, 1))
    with pytest.raises(TransferError, match="named a"):
        second.register(MemoryRegion(0, 1))
    first.close()
    second.register(MemoryRegion(0, 1))
    second.close()


def test_closed_peer_is_never_written_to() -> None:
    ends = Ends("")
    ends.target.close()
    with pytest.raises(TransferError):
        ends.source.post_write(PeerName("target"), [CopyOp(0, 0, 8)], b"n")
    assert not ends.target_bytes.any()


def test_manager_and_registry_import_neither_torch_nor_ucx() -> None:
    code = (
        "import sys; import isthmus.kvtransfer.manager, isthmus.kvtransfer.connectors.registry; "
        "loaded = {name.split('.')[0] for name in sys.modules}; "
        "sys.exit(bool(loaded & {'torch', 'nixl_cu13', 'ucxx'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
