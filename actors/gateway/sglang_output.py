"""The answers of `/generate` as SGLang tells them, put together from the engine's deltas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actorium.actors.client.requests import StreamDelta
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.sglang_body import Telling
from actorium.actors.messages import TokenLogprob, Usage

WEIGHT_VERSION = "default"
"""SGLang's name of weights that were never replaced while serving."""
Row = tuple[float | None, int, str | None]
"""Log-probability, token, and the token's text where that is asked for."""


class Output:
    """One completion, as far as it has come."""

    def __init__(self, name: str, telling: Telling, text_of: Callable[[int], str] | None,
                 mute: bool = False, first: int | None = None) -> None:
        """text_of: of tokens, where it is told; mute: the prompt alone is wanted; first: the first
        token of the prompt, where its log-probabilities are told from there on."""
        self._name, self._telling, self._text_of = name, telling, text_of
        self._mute, self._first = mute, first
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: list[TokenLogprob | None] = []
        self._last: StreamDelta | None = None
        self.prompt_tokens = 0
        """Until the end, which says how many there were."""

    def add(self, delta: StreamDelta) -> None:
        """Something more of it. Raises `HttpError` on a place that is not in the prompt."""
        self._text.append(delta.text)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self._prompt = delta.prompt_logprobs
            if self._telling.start > len(self._prompt):
                raise HttpError(400, f"logprob_start_len: {self._telling.start}, in a prompt of "
                                f"{len(self._prompt)} tokens", "logprob_start_len")
        if delta.finish_reason is not None:
            self._last = delta

    def told(self, seconds: float) -> dict[str, Any]:
        """All there is. seconds: since the request came."""
        mute = self._mute
        return {"text": "" if mute else "".join(self._text),
                "output_ids": [] if mute else list(self._ids), "meta_info": self._meta(seconds)}

    def _meta(self, seconds: float) -> dict[str, Any]:
        last = self._last
        used = last.usage if last is not None and last.usage is not None else \
            Usage(self.prompt_tokens, 0, len(self._ids))
        done = 0 if self._mute else used.completion_tokens
        meta: dict[str, Any] = {
            "id": self._name, "finish_reason": self._reason(done),
            "prompt_tokens": used.prompt_tokens, "weight_version": WEIGHT_VERSION,
            **self._told_logprobs(), "completion_tokens": done,
            "cached_tokens": used.cached_tokens}
        if last is not None:
            meta |= _speculation(used) | {"e2e_latency": seconds}
        return meta

    def _reason(self, tokens: int) -> dict[str, Any] | None:
        last = self._last
        if last is None:
            return None
        if last.finish_reason == "abort":
            return {"type": "abort", "message": "The request was aborted.", "status_code": None,
                    "err_type": None}
        if self._mute or last.finish_reason != "stop":
            return {"type": "length", "length": tokens}
        matched = last.stop_reason
        if matched is None and self._ids:
            matched = self._ids[-1]  # the model's own end of a sequence
        return {"type": "stop", "matched": matched}

    # --- log-probabilities ---

    def _told_logprobs(self) -> dict[str, Any]:
        telling = self._telling
        if not telling.wanted:
            return {}
        prompt, said = self._prompt_part(), [] if self._mute else self._logprobs
        told: dict[str, Any] = {
            "input_token_logprobs": self._prompt_rows(prompt),
            "output_token_logprobs": [self._row(one.logprob, one.token_id) for one in said]}
        if telling.top or telling.ids:
            kind = "top_logprobs" if telling.top else "token_ids_logprobs"
            told[f"input_{kind}"] = [None if i == 0 or one is None else self._alternatives(one)
                                     for i, one in enumerate(prompt)]
            told[f"output_{kind}"] = [self._alternatives(one) for one in said]
        return told

    def _prompt_part(self) -> Sequence[TokenLogprob | None]:
        return self._prompt[self._telling.start:] if self._telling.start >= 0 else []

    def _prompt_rows(self, prompt: Sequence[TokenLogprob | None]) -> list[Row]:
        """The first has no log-probability, whatever stands before it."""
        rows = []
        for i, one in enumerate(prompt):
            if one is not None:
                rows.append(self._row(one.logprob if i else None, one.token_id))
            elif self._first is not None:
                rows.append(self._row(None, self._first))
        return rows

    def _alternatives(self, one: TokenLogprob) -> list[Row]:
        return [self._row(value, token) for token, value in one.top]

    def _row(self, logprob: float | None, token: int) -> Row:
        return logprob, token, None if self._text_of is None else self._text_of(token)


def _speculation(used: Usage) -> dict[str, Any]:
    """Of drafts, where there were any. spec_verify_ct: the request's steps, each of which gives a
    token beside those drafts that it accepts."""
    if not used.draft_tokens:
        return {}
    steps = used.completion_tokens - used.accepted_tokens
    return {"spec_accept_rate": used.accepted_tokens / used.draft_tokens,
            "spec_accept_length": used.completion_tokens / max(steps, 1),
            "spec_accept_token_num": used.accepted_tokens,
            "spec_draft_token_num": used.draft_tokens, "spec_verify_ct": steps}
