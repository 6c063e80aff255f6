"""What a simulated instance is: role, speed, room. Plain data, made by ``sim.profiles``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version

from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.sim.step_model import StepModel

MODEL = "simulated"
VERSION = version("isthmus")
WATERMARK = 0.01  # as ``engine.watermark``


class Batching(Enum):
    """How an instance makes its batches."""

    CHUNKED = "chunked"  # as the engine of Isthmus: one token budget, decodes first
    PROMPTS_FIRST = "prompts_first"  # DistServe's simulator: whole prompts, then decodes


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """``link_bytes_per_ms`` is of each direction; it is shared by the transfers in flight.

    ``believed``: the speed that the instance tells the router, where it is not the true one.
    """

    instance_id: InstanceId
    role: Role
    model: StepModel
    num_gpus: int = 1
    hardware: str = ""
    num_blocks: int = 4_096
    block_size: int = 16
    max_num_batched_tokens: int = 2_048
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    kv_token_bytes: int = 4_096
    link_bytes_per_ms: float = 25e6
    batching: Batching = Batching.CHUNKED
    has_prefix_cache: bool = True
    fetch_min_tokens: int = 0  # as ``common.cluster.InstanceInfo``
    believed: StepModel | None = None

    @property
    def watermark_blocks(self) -> int:
        return int(self.num_blocks * WATERMARK)

    @property
    def longest(self) -> int:
        """Tokens of a sequence that fits when it is alone."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def info(self, epoch: int, state: InstanceState = InstanceState.READY) -> InstanceInfo:
        """Its record in the registry."""
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.role,
            state=state,
            epoch=epoch,
            address=f"{self.instance_id}:0",
            metrics_address="",
            model=MODEL,
            model_path="",
            kv_layout=self._layout(),
            num_blocks=self.num_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            connector="fake",
            latency=(self.believed or self.model).as_latency(),
            version=VERSION,
            fetch_min_tokens=self.fetch_min_tokens,
        )

    def _layout(self) -> KvLayout:
        """One that has ``kv_token_bytes`` a token: one layer, one head, K and V of bfloat16."""
        head_dim = max(1, self.kv_token_bytes // 4)
        return KvLayout("simulated", 1, 1, head_dim, self.block_size, "bfloat16")
