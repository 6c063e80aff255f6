from isthmus.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListInstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManagedInstance(_message.Message):
    __slots__ = ("instance_id", "role", "pid", "num_restarts", "last_exit", "info")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_EXIT_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: _common_pb2.Role
    pid: int
    num_restarts: int
    last_exit: str
    info: _common_pb2.InstanceInfo
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., pid: _Optional[int] = ..., num_restarts: _Optional[int] = ..., last_exit: _Optional[str] = ..., info: _Optional[_Union[_common_pb2.InstanceInfo, _Mapping]] = ...) -> None: ...

class FrontProcess(_message.Message):
    __slots__ = ("name", "kind", "pid", "num_restarts", "last_exit", "address", "has_router", "is_leading")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_EXIT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_ROUTER_FIELD_NUMBER: _ClassVar[int]
    IS_LEADING_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    pid: int
    num_restarts: int
    last_exit: str
    address: str
    has_router: bool
    is_leading: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., pid: _Optional[int] = ..., num_restarts: _Optional[int] = ..., last_exit: _Optional[str] = ..., address: _Optional[str] = ..., has_router: _Optional[bool] = ..., is_leading: _Optional[bool] = ...) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("instances", "cluster", "gateway_address", "model", "front")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[ManagedInstance]
    cluster: str
    gateway_address: str
    model: str
    front: _containers.RepeatedCompositeFieldContainer[FrontProcess]
    def __init__(self, instances: _Optional[_Iterable[_Union[ManagedInstance, _Mapping]]] = ..., cluster: _Optional[str] = ..., gateway_address: _Optional[str] = ..., model: _Optional[str] = ..., front: _Optional[_Iterable[_Union[FrontProcess, _Mapping]]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("role", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    replicas: int
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("old_replicas", "new_replicas")
    OLD_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NEW_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    old_replicas: int
    new_replicas: int
    def __init__(self, old_replicas: _Optional[int] = ..., new_replicas: _Optional[int] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
