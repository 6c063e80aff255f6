"""Updates of a prefill stream ⇄ messages."""

from __future__ import annotations

from isthmus.common.prefill import (
    PrefillAccepted,
    PrefillChunkSent,
    PrefillFailed,
    PrefillFinished,
    PrefillFirstToken,
    PrefillPrefixWanted,
    PrefillUpdate,
)
from isthmus.protos.convert.errors import error_from_pb, error_to_pb
from isthmus.protos.convert.requests import (
    finish_reason_from_pb,
    finish_reason_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    timeline_from_pb,
    timeline_to_pb,
)
from isthmus.protos.convert.transfers import ticket_from_pb, ticket_to_pb
from isthmus.protos.v1 import prefill_pb2 as pb


def update_to_pb(update: PrefillUpdate) -> pb.PrefillResponse:
    match update:
        case PrefillPrefixWanted():
            return pb.PrefillResponse(
                prefix_wanted=pb.PrefillPrefixWanted(ticket=ticket_to_pb(update.ticket))
            )
        case PrefillAccepted():
            return pb.PrefillResponse(
                accepted=pb.PrefillAccepted(num_cached_tokens=update.num_cached_tokens)
            )
        case PrefillChunkSent():
            return pb.PrefillResponse(
                chunk_sent=pb.PrefillChunkSent(chunk=update.chunk, num_tokens=update.num_tokens)
            )
        case PrefillFirstToken():
            return pb.PrefillResponse(first_token=_first_token_to_pb(update))
        case PrefillFinished():
            return pb.PrefillResponse(
                finished=pb.PrefillFinished(
                    num_chunks=update.num_chunks,
                    bytes_sent=update.bytes_sent,
                    timeline=timeline_to_pb(update.timeline),
                )
            )
        case PrefillFailed():
            return pb.PrefillResponse(
                failed=pb.PrefillFailed(error=error_to_pb(update.error), quiesced=update.quiesced)
            )


def _first_token_to_pb(update: PrefillFirstToken) -> pb.PrefillFirstToken:
    return pb.PrefillFirstToken(
        token_id=update.token_id,
        logprob=logprob_to_pb(update.logprob) if update.logprob else None,
        prompt_logprobs=[logprob_to_pb(logprob) for logprob in update.prompt_logprobs],
        num_cached_tokens=update.num_cached_tokens,
        finish_reason=finish_reason_to_pb(update.finish_reason),
        timeline=timeline_to_pb(update.timeline),
    )


def update_from_pb(message: pb.PrefillResponse) -> PrefillUpdate | None:
    """None for a kind that is not known here: an update only tells of progress, but for the last
    ones, and a stream that ends without one of these has broken."""
    match message.WhichOneof("update"):
        case "prefix_wanted":
            return PrefillPrefixWanted(ticket_from_pb(message.prefix_wanted.ticket))
        case "accepted":
            return PrefillAccepted(message.accepted.num_cached_tokens)
        case "chunk_sent":
            return PrefillChunkSent(message.chunk_sent.chunk, message.chunk_sent.num_tokens)
        case "first_token":
            return _first_token_from_pb(message.first_token)
        case "finished":
            finished = message.finished
            return PrefillFinished(
                finished.num_chunks, finished.bytes_sent, timeline_from_pb(finished.timeline)
            )
        case "failed":
            return PrefillFailed(error_from_pb(message.failed.error), message.failed.quiesced)
        case _:
            return None


def _first_token_from_pb(message: pb.PrefillFirstToken) -> PrefillFirstToken:
    return PrefillFirstToken(
        token_id=message.token_id,
        num_cached_tokens=message.num_cached_tokens,
        logprob=logprob_from_pb(message.logprob) if message.HasField("logprob") else None,
        prompt_logprobs=tuple(logprob_from_pb(item) for item in message.prompt_logprobs),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        timeline=timeline_from_pb(message.timeline),
    )
