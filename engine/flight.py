"""The life of one step.

::

    PLANNED ──▶ LAUNCHED ──▶ LANDED        PLANNED   its tokens are spoken for, its tables in flight
       └──────────────────────▲            LAUNCHED  the model runs it, now or when it is waited for
     (the launch failed)                   LANDED    its outcome is known; nothing of it runs

With asynchronous scheduling step n + 1 is planned and launched before step n lands::

    engine thread   plan n+1, launch n+1 │ wait for n │ enter n │ plan n+2, launch n+2 │ …
    device          ──────── step n ─────────────────┤├───────── step n+1 ──────────────
"""

from __future__ import annotations

from enum import Enum

from isthmus.common.clock import Clock
from isthmus.common.errors import InstanceLostError, InternalError
from isthmus.common.layer_progress import LayerProgress
from isthmus.common.logging import get_logger
from isthmus.common.state_machine import Transitions
from isthmus.engine.block_table import BlockTable
from isthmus.engine.runner import LaunchedStep, Runner, StepTokens
from isthmus.engine.scheduler import StepPlan

_log = get_logger("engine")


class FlightState(Enum):
    PLANNED = "planned"
    LAUNCHED = "launched"
    LANDED = "landed"


FLIGHT_TRANSITIONS: Transitions[FlightState] = Transitions(
    {
        FlightState.PLANNED: frozenset({FlightState.LAUNCHED, FlightState.LANDED}),
        FlightState.LAUNCHED: frozenset({FlightState.LANDED}),
        FlightState.LANDED: frozenset(),
    }
)


class Flight:
    """One step from its plan to its outcome. The engine thread alone touches it."""

    def __init__(self, plan: StepPlan, tables: tuple[BlockTable, ...]) -> None:
        self.plan = plan
        self.tables = tables
        self.state = FlightState.PLANNED
        self.launched_ns = 0  # unix time
        self.began_ns = 0  # monotonic
        self._launched: LaunchedStep | None = None
        self._failure: InternalError | None = None

    def launch(self, runner: Runner, clock: Clock, *, is_watched: bool = False) -> None:
        """A failure is the outcome. Raises InstanceLostError alone: a rank is gone, so this
        instance is over, and its requests go elsewhere."""
        self.launched_ns, self.began_ns = clock.now_ns(), clock.monotonic_ns()
        try:
            self._launched = runner.launch(self.plan, is_watched=is_watched)
        except InstanceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model raises ends a step, not us
            self._fail(error)
        else:
            self._move_to(FlightState.LAUNCHED)

    @property
    def progress(self) -> LayerProgress | None:
        """Of a step that was launched to be watched."""
        return None if self._launched is None else self._launched.progress

    def land(self) -> StepTokens | InternalError:
        """Waits for the step. A failure is the outcome, but for InstanceLostError as above."""
        tokens: StepTokens = {}
        if self._launched is not None:
            try:
                tokens = self._launched.wait()
            except InstanceLostError:
                raise
            except Exception as error:  # noqa: BLE001
                self._fail(error)
            else:
                self._move_to(FlightState.LANDED)
        return tokens if self._failure is None else self._failure

    def _fail(self, error: Exception) -> None:
        _log.exception("step failed", step_id=self.plan.step_id)
        self._failure = InternalError(f"engine step failed: {error}", stage="step")
        self._move_to(FlightState.LANDED)

    def _move_to(self, state: FlightState) -> None:
        self.state = FLIGHT_TRANSITIONS.check(self.state, state)
