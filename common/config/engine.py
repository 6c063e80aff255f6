"""What one instance runs: the model, its engine, and how many instances of a role there are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.common.config_node import Node

DTypeName = Literal["auto", "float32", "bfloat16"]
KvDTypeName = Literal["auto", "bfloat16", "float32", "int8", "fp8_e4m3"]


def _unquoted(value: object) -> object:
    """YAML takes a bare ``on`` or ``off`` for a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class ModelConfig(Node):
    path: str = Field("sample", description="directory, .gguf file, or 'sample' (SmolLM2-135M)")
    served_name: str = Field("", description="name in the API; default: the model's own")
    dtype: DTypeName = Field(
        "auto",
        description="weights, and KV where engine.kv_dtype is auto; auto = the checkpoint's, bf16",
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="weights of products, rounded when they are loaded; int8 = CPU only"
    )
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0 = the model's own limit")


class EngineConfig(Node):
    block_size: int = Field(16, ge=1, description="tokens per KV block")
    num_blocks: int = Field(0, ge=0, description="KV blocks; 0 = as many as kv_cache_gib holds")
    kv_cache_gib: float = Field(
        1.0,
        ge=0,
        description="memory for KV blocks of one instance; 0 = on a GPU (one rank) what "
        "gpu_memory_share leaves",
    )
    kv_dtype: KvDTypeName = Field(
        "auto",
        description="KV blocks: auto = as the weights; int8 and fp8_e4m3 (GPU only) take about "
        "half of bfloat16's memory. Prefill instances may keep a wider one than decode instances: "
        "KV is converted when it is sent",
    )
    gpu_memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a GPU for weights, steps and KV blocks, where kv_cache_gib is 0",
    )
    kv_memory: Literal["auto", "private", "shared"] = Field(
        "auto",
        description="whether other processes of the host can map the KV blocks, as connector shm "
        "needs them; auto = where that costs nothing (shared memory has huge pages) or shm is "
        "the connector (CPU only)",
    )
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one step")
    max_num_seqs: int = Field(64, ge=1, description="most running sequences")
    watermark: float = Field(0.02, ge=0, lt=0.5, description="share of blocks kept for growth")
    enable_prefix_cache: bool = Field(
        True, description="keep blocks of finished prompts for prompts that begin alike"
    )
    num_threads: int = Field(1, ge=1, description="CPU threads of the engine's kernels")
    kernels: dict[str, str] = Field(
        default_factory=dict,
        description="implementation (cpu, triton, reference) of an op, where it is to be another "
        "than the fastest; `isthmus doctor --kernels` lists the ops",
    )
    device: str = Field("cpu", description="cpu or cuda:N; of several ranks the first one's")
    tp_size: int = Field(
        1, ge=1, le=64, description="ranks (processes, devices) that hold an instance's model"
    )
    tp_timeout_ms: int = Field(
        30_000, ge=1, description="longest wait of one rank for another within a step"
    )
    async_scheduling: Annotated[Literal["auto", "on", "off"], BeforeValidator(_unquoted)] = Field(
        "auto", description="plan the next step while one runs; auto = on a GPU only"
    )
    cuda_graphs: bool = Field(
        True, description="capture decode steps at start and replay them (GPU only)"
    )

    @model_validator(mode="after")
    def _one_rank_measures(self) -> EngineConfig:
        if self.tp_size > 1 and not (self.kv_cache_gib or self.num_blocks):
            raise ValueError(
                "kv_cache_gib 0 is measured by one rank only: say how much, or num_blocks"
            )
        return self

    @model_validator(mode="after")
    def _device_reads_kv(self) -> EngineConfig:
        if self.kv_dtype == "fp8_e4m3" and self.device.startswith("cpu"):
            raise ValueError(
                "kv_dtype fp8_e4m3 is read by attention on GPUs only, and device is "
                f"{self.device}: take int8"
            )
        return self


class PoolConfig(Node):
    replicas: int = Field(0, ge=0, description="instances of this role")
    engine: EngineConfig = EngineConfig()
    cpus: list[int] = Field(default_factory=list, description="cores to pin to; empty = no pinning")
    zone: str = Field("", max_length=63, description="of this pool's instances; default: ``zone``")
