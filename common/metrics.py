"""Every metric of Isthmus, declared once. Dashboards, alerts and docs are checked against this.

Base units only (seconds, bytes); counters end in ``_total``. A process serves its own /metrics;
``role`` is gateway, prefill, decode or mixed and is on every series that an instance makes.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from isthmus.common.tally import TallyHistogram

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
_SLACK = (-10, -5, -2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# --- gateway: what a client sees ---------------------------------------------------------------
REQUESTS = Counter(
    "isthmus_requests",
    "Requests by outcome (good, late_ttft, late_tpot, both, late_e2e, rejected, error, cancelled, "
    "invalid), counted once at their end",
    ["slo_class", "tenant", "outcome"],
)
REQUESTS_OFFERED = Counter(
    "isthmus_requests_offered",
    "Requests that came with a valid body, or were refused or failed before it was read: the "
    "demand",
    ["slo_class", "tenant"],
)
GOODPUT_RATIO = Gauge(
    "isthmus_goodput_ratio",
    "Good requests of those offered that ended within the last minute; absent when none did",
    ["slo_class", "tenant"],
)
ADMISSION = Counter(
    "isthmus_admission",
    "Requests by what was decided (admit: at once; queue: after a wait; degrade: served, though a "
    "target cannot be met; reject) and why",
    ["slo_class", "tenant", "decision", "reason"],
)
PREDICTED_TTFT = TallyHistogram(
    "isthmus_predicted_ttft_seconds",
    "TTFT as the decision predicted it, from the decision on",
    ["slo_class"],
    buckets=_LATENCY,
)
PREDICTED_TPOT = TallyHistogram(
    "isthmus_predicted_tpot_seconds",
    "TPOT as the decision predicted it",
    ["slo_class"],
    buckets=_PER_TOKEN,
)
SLACK = Histogram(
    "isthmus_slack_seconds",
    "Time left of a target (ttft, tpot) at the decision, going by the prediction",
    ["slo_class", "target"],
    buckets=_SLACK,
)
REQUESTS_INFLIGHT = Gauge("isthmus_requests_inflight", "Requests being served")
REQUESTS_HELD = Gauge(
    "isthmus_requests_held", "Requests and choices that wait for an instance to be ready"
)
TTFT = TallyHistogram(
    "isthmus_ttft_seconds",
    "Request body read → first content flushed (streamed) or first token received (not streamed)",
    ["slo_class"],
    buckets=_LATENCY,
)
TPOT = TallyHistogram(
    "isthmus_tpot_seconds",
    "(Last token − first token received) / (output tokens − 1), of the slowest choice",
    ["slo_class"],
    buckets=_PER_TOKEN,
)
ITL = TallyHistogram(
    "isthmus_itl_seconds", "Gap between two output tokens at the gateway", buckets=_PER_TOKEN
)
E2E = TallyHistogram(
    "isthmus_e2e_seconds",
    "Request body read → last content flushed",
    ["slo_class"],
    buckets=_LATENCY,
)
SECOND_TOKEN_GAP = TallyHistogram(
    "isthmus_second_token_gap_seconds",
    "First token → second token: where a transfer would hide",
    ["slo_class"],
    buckets=_LATENCY,
)
STAGE = TallyHistogram(
    "isthmus_stage_seconds", "Parts of a request's life", ["stage"], buckets=(*_FAST, 10, 20, 40)
)
PROMPT_TOKENS = Counter("isthmus_prompt_tokens", "Prompt tokens of finished requests")
CACHED_TOKENS = Counter("isthmus_cached_tokens", "Prompt tokens served from a prefix cache")
OUTPUT_TOKENS = Counter("isthmus_output_tokens", "Tokens sent to clients")
CANCELS = Counter("isthmus_cancels", "Requests whose client went away, by stage", ["stage"])
RETRIES = Counter("isthmus_retries", "Requests sent again after a fault", ["reason"])
HTTP_ERRORS = Counter("isthmus_http_errors", "Error answers by status and code", ["status", "code"])
LOCAL_PREFILL = Counter(
    "isthmus_local_prefill", "Prompts computed on the decode instance", ["reason"]
)
DECISIONS = Counter("isthmus_route_decisions", "Route decisions", ["policy", "path"])
ROUTE_FALLBACK = Counter("isthmus_route_fallback", "Decisions made without load information")
ROUTER_FALLBACK = Counter(
    "isthmus_router_fallback",
    "Decisions that a gateway made by itself for want of a router, by why",
    ["reason"],
)
ROUTER_LEADING = Gauge(
    "isthmus_router_leading", "1 while the router of this process decides for all gateways"
)
INDEX_BLOCKS = Gauge("isthmus_router_index_blocks", "Blocks in the router's prefix index")
RESERVATIONS = Gauge("isthmus_router_reservations", "Open reservations in the ledger")
QUERIES_HELD = Gauge(
    "isthmus_router_held", "Queries that wait in the router until an instance can begin them"
)
HOLDS = Counter(
    "isthmus_router_holds",
    "Queries that had to wait, by what was in the way (in_line, prefill_busy, decode_full, ttft, "
    "tpot, no_decode_instance, reserved)",
    ["reason"],
)
PREDICTION_COVERAGE = Gauge(
    "isthmus_prediction_coverage",
    "Share of recent times (ttft, local_ttft, tpot) that were within the predicted quantile, by "
    "today's model of an instance that has become another one since",
    ["kind", "quantile"],
)
PROMISES_KEPT = Gauge(
    "isthmus_promises_kept_ratio",
    "Share of the same times that were within what was promised when they were decided",
    ["kind", "quantile"],
)
PREDICTION_ALARM = Gauge(
    "isthmus_prediction_alarm",
    "1 while the coverage of a predicted quantile is off by more than 0.05",
    ["kind", "quantile"],
)
SHADOW_PRICE = Gauge(
    "isthmus_shadow_price",
    "What a second of a pool (prefill, decode) is worth in the choice of a pair",
    ["resource"],
)
INSTANCES = Gauge("isthmus_instances", "Instances known to the router", ["role", "state"])

# --- instances ---------------------------------------------------------------------------------
KV_BLOCKS = Gauge(
    "isthmus_kv_blocks",
    "KV blocks by state: used, held (for a transfer), cached, free, quarantined",
    ["role", "instance", "state"],
)
STEP = Histogram("isthmus_step_seconds", "Engine steps", ["role", "instance"], buckets=_FAST)
STEP_TOKENS = Histogram(
    "isthmus_step_tokens", "Tokens per engine step", ["role", "instance", "kind"], buckets=_COUNTS
)
RUNNING_SEQS = Gauge("isthmus_running_seqs", "Running sequences", ["role", "instance"])
WAITING_SEQS = Gauge("isthmus_waiting_seqs", "Waiting sequences", ["role", "instance"])
COMPUTED_PROMPT_TOKENS = Counter(
    "isthmus_computed_prompt_tokens", "Prompt tokens computed here", ["role", "instance"]
)
PREEMPTIONS = Counter("isthmus_preemptions", "Sequences preempted", ["role", "instance"])
PACED_STEPS = Counter(
    "isthmus_paced_steps",
    "Steps whose prompts were cut short for the TPOT targets of sequences that decode",
    ["role", "instance"],
)
TRANSFERS = Counter(
    "isthmus_kv_transfers",
    "Transfers by final state",
    ["role", "instance", "side", "state", "connector"],
)
TRANSFERS_OPEN = Gauge(
    "isthmus_kv_transfers_open", "Sessions by state", ["role", "instance", "side", "state"]
)
TRANSFER_BYTES = Counter(
    "isthmus_kv_transfer_bytes",
    "KV bytes moved over the connector, counted at the side named",
    ["role", "instance", "side", "connector"],
)
KV_EXPOSED = Histogram(
    "isthmus_kv_exposed_seconds",
    "Last prefill step ended → KV complete: the part of a transfer that no compute hides",
    ["role", "instance"],
    buckets=_FAST,
)
LINK_RATE = Gauge(
    "isthmus_kv_link_bytes_per_second",
    "KV bytes a second to another instance, moving average over ended writes",
    ["role", "instance", "peer", "connector"],
)
TRANSFERS_HOPELESS = Counter(
    "isthmus_kv_transfers_hopeless",
    "Transfers given up early: the link was too slow for what was left of their time",
    ["role", "instance", "connector"],
)
CORRUPT_BLOCKS = Counter(
    "isthmus_kv_corrupt_blocks",
    "Received KV blocks that are not what was sent, by their checksums",
    ["role", "instance", "connector"],
)
PREFILL_FAILURES = Counter(
    "isthmus_prefill_failures",
    "Prompts that another instance could not compute or send, by what the request's class asks "
    "for, what was done, and why",
    ["role", "instance", "policy", "remedy", "reason"],
)
CANARY = Counter(
    "isthmus_canary",
    "Served requests that were computed again on the decode instance, by what came of it",
    ["role", "instance", "result"],
)
CANARY_MISMATCH = Counter(
    "isthmus_canary_mismatch",
    "Of these, answers that were not what the decode instance computes, by who computed the prompt",
    ["role", "instance", "prefill"],
)
CANARY_TOKENS = Counter(
    "isthmus_canary_prompt_tokens",
    "Prompt tokens computed for them; isthmus_computed_prompt_tokens_total counts them, too",
    ["role", "instance"],
)
NOTIFICATIONS_IGNORED = Counter(
    "isthmus_kv_notifications_ignored",
    "Notifications of a peer that changed nothing, by reason",
    ["role", "instance", "reason"],
)
PREFIX_FETCHES = Counter(
    "isthmus_prefix_fetches",
    "Times that KV of a prompt's first tokens was asked of the decode instance",
    ["role", "instance", "result"],
)
PREFIX_FETCHED_TOKENS = Counter(
    "isthmus_prefix_fetched_tokens",
    "Prompt tokens that were fetched from decode instances instead of being computed",
    ["role", "instance"],
)
HOLD_EXPIRED = Counter("isthmus_kv_hold_expired", "Holds that ran out", ["role", "instance"])
ABORTED = Counter("isthmus_aborted", "Sequences aborted in the engine", ["role", "instance"])
INSTANCE_UP = Gauge("isthmus_instance_up", "1 while ready", ["role", "instance", "epoch"])
