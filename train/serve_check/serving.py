"""Their side: stock SGLang answers the same token ids, with the draft and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from target_bridge.serving.server import EngineServer, ServedOutput
from train.evaluate.config import GREEDY_BELOW
from train.serve_check.accounting import ServedSample, read_plain, read_served
from train.serve_check.offline import Asked

#: New tokens of the requests that warm a server up: a few rounds, so that decoding's kernels exist too.
WARM_TOKENS = 24


@dataclass(frozen=True)
class ServedPass:
    """All prompts served once.

    Attributes:
        samples: in the order asked.
        seconds: the engine took, from the first prompt's arrival to the last token.
        cached_tokens: prompt tokens it found in its prefix cache.
    """

    samples: tuple[ServedSample, ...]
    seconds: float
    cached_tokens: int

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Kept output tokens per second, all requests together."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {sample.prompt: sample.tokens for sample in self.samples}


def sampling_parameters(temperature: float, budget: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Sampling from the whole distribution at `temperature`, ending at our stop ids or at the budget.

    Everything that the model's generation_config could set otherwise is named.
    """
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "max_new_tokens": budget,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(eos_ids),
        "ignore_eos": not eos_ids,
    }


def serve_pass(
    server: EngineServer,
    asked: Asked,
    temperature: float,
    eos_ids: Sequence[int],
    block_size: int | None,
    concurrency: int,
) -> ServedPass:
    """Serves all prompts once, warmed up, from an empty prefix cache.

    Args:
        server: running.
        asked: prompts and budgets.
        temperature: of all requests.
        eos_ids: stop ids.
        block_size: K of the draft served; None when none is.
        concurrency: requests in flight, hence as many to warm up with.

    Raises:
        AccountingError: an answer cannot be counted.
        ServerFailure: the server failed.
    """
    ids = [prompt.input_ids.tolist() for prompt in asked.prompts]
    few = min(concurrency, len(ids))
    warm = [sampling_parameters(temperature, min(WARM_TOKENS, budget), eos_ids) for budget in asked.budgets[:few]]
    server.generate(ids[:few], warm)
    server.flush()
    parameters = [sampling_parameters(temperature, budget, eos_ids) for budget in asked.budgets]
    outputs, seconds = server.generate(ids, parameters)
    server.flush()
    samples = tuple(
        read_plain(prompt.id, output, eos_ids, budget)
        if block_size is None
        else read_served(prompt.id, output, eos_ids, budget, block_size)
        for prompt, output, budget in zip(asked.prompts, outputs, asked.budgets)
    )
    return ServedPass(samples, seconds, sum(int(output.meta.get("cached_tokens") or 0) for output in outputs))


def margins(
    server: EngineServer, prompts: Mapping[str, Sequence[int]], places: Mapping[str, Sequence[int]]
) -> dict[str, float | None]:
    """How clear plain decoding's choice was: the gap of its two largest logits at a place in an output.

    SGLang gives no log-probabilities with a DSpark draft, so the plain server is asked, by prefilling the text
    up to there; a difference of two log-probabilities is a difference of logits.

    Args:
        server: running without a draft.
        prompts: prompt id -> its ids.
        places: prompt id -> the output's ids before the place.
    """
    if not places:
        return {}
    ids = [[*map(int, prompts[name]), *before] for name, before in places.items()]
    one = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    outputs, _ = server.generate(ids, [one] * len(ids), top_logprobs=2)
    return {name: _gap(output) for name, output in zip(places, outputs)}


def _gap(output: ServedOutput) -> float | None:
    """Of the first generated token: [[(log-probability, id, text), ...], ...] per token, best first."""
    tops = output.meta.get("output_top_logprobs")
    if not tops or not tops[0] or len(tops[0]) < 2:
        return None
    return float(tops[0][0][0]) - float(tops[0][1][0])
