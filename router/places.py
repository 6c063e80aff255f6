"""What whoever admits and binds asks of the cluster (``placement`` answers)."""

from __future__ import annotations

from typing import Protocol

from isthmus.common.ids import InstanceId
from isthmus.router.capacity import Capacity
from isthmus.router.forecast import NO_PRESS, Press
from isthmus.router.placement import Look
from isthmus.router.types import RouteQuery


class Places(Protocol):
    def look(
        self,
        query: RouteQuery,
        now_ns: int,
        *,
        is_on_time: bool = True,
        is_starving: bool = False,
        is_last_chance: bool = False,
        left_alone: InstanceId | None = None,
        press: Press = NO_PRESS,
    ) -> Look | None: ...

    def nearest_room(self, query: RouteQuery, now_ns: int) -> InstanceId | None: ...

    def num_news(self, now_ns: int) -> int: ...

    def soonest_start_ms(self, model: str, now_ns: int) -> float: ...

    def capacity(self, model: str, now_ns: int) -> Capacity: ...

    def hope(self, model: str, now_ns: int) -> float: ...

    def others(self, model: str, now_ns: int, chosen: InstanceId) -> tuple[float, int]: ...

    def elapsed_ms(self, query: RouteQuery) -> float: ...

    def missed(self, query: RouteQuery, obstacle: str, now_ns: int) -> None: ...
