"""What `draft-jax serve-check` may be told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from target_bridge.serving.server import Deadlines

#: Server arguments that serve-check itself decides; --server-arg may not.
RESERVED = frozenset({
    "model_path", "skip_tokenizer_init", "dtype", "context_length", "max_running_requests", "random_seed",
    "trust_remote_code", "speculative_algorithm", "speculative_draft_model_path", "speculative_dspark_block_size",
    "speculative_num_draft_tokens",
})  # fmt: skip


@dataclass(frozen=True)
class ServeConfig:
    """Options of one check; the evaluation's own are handed to `draft-jax eval` as they are.

    Attributes:
        temperatures: one comparison each.
        tolerance: largest relative difference of the two accept lengths that still passes.
        concurrency: requests in flight in the server (its max_running_requests).
        plain: also serve without the draft: speed to compare with, tokens to be equal to.
        attention_backend: SGLang's; None = its own choice.
        draft_attention_backend: for the draft; None = as the target's.
        memory: SGLang's mem_fraction_static; None = its own choice.
        arguments: further arguments of `sglang.Engine`.
        python: interpreter that has sglang.
        pythonpath: folders for that interpreter alone, first on its path.
        deadlines: of the server.
        eval_timeout: seconds for one offline evaluation.
        seed: of the server's sampling.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    tolerance: float = 0.03
    concurrency: int = 16
    plain: bool = True
    attention_backend: str | None = None
    draft_attention_backend: str | None = None
    memory: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    pythonpath: tuple[str, ...] = ()
    deadlines: Deadlines = field(default_factory=Deadlines)
    eval_timeout: float = 3600.0
    seed: int = 980406

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("no temperature to compare at; give --temperature 0 1")
        for temperature in self.temperatures:
            if not 0.0 <= temperature < float("inf"):
                raise ValueError(f"--temperature {temperature}: give 0 (greedy) or a positive number")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"--temperature {' '.join(f'{t:g}' for t in self.temperatures)}: one of them comes twice")
        if not 0.0 < self.tolerance < 1.0:
            raise ValueError(f"--tolerance {self.tolerance}: it is a relative difference, give 0.03 for 3 %")
        if self.concurrency < 1:
            raise ValueError(f"--concurrency {self.concurrency}: at least one request must run")
        if self.memory is not None and not 0.0 < self.memory < 1.0:
            raise ValueError(f"--server-memory {self.memory}: a share of the GPU, give 0 to 1")
        if self.eval_timeout <= 0:
            raise ValueError(f"--eval-timeout {self.eval_timeout}: give seconds above 0")
        if decided := sorted(RESERVED & set(self.arguments)):
            raise ValueError(f"--server-arg {decided[0]}: serve-check decides that itself, or the comparison breaks")

    def engine(
        self, target: str, dtype: str, context_length: int, *, draft: str | None, block_size: int, trust: bool
    ) -> dict[str, Any]:
        """Keyword arguments of `sglang.Engine`.

        Args:
            target: the target's folder or hub name.
            dtype: of target and draft, as in the offline evaluation.
            context_length: tokens a request may have.
            draft: the exported draft's folder; None = plain decoding.
            block_size: K; the server's verify window is K + 1 (field_survey 3.2).
            trust: run Python code that comes with the target.
        """
        arguments: dict[str, Any] = {
            "model_path": target,
            "skip_tokenizer_init": True,  # ids in, ids out
            "dtype": dtype,
            "context_length": context_length,
            "max_running_requests": self.concurrency,
            "random_seed": self.seed % 2**31,
            "trust_remote_code": trust,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "log_level": "info",  # Engine's own default is errors only, and a failure is told from the log
        }
        if self.memory is not None:
            arguments["mem_fraction_static"] = self.memory
        if self.attention_backend is not None:
            arguments["attention_backend"] = self.attention_backend
        if draft is not None:
            arguments |= {
                "speculative_algorithm": "DSPARK",
                "speculative_draft_model_path": draft,
                "speculative_dspark_block_size": block_size,
                "speculative_num_draft_tokens": block_size + 1,
            }
            if backend := self.draft_attention_backend or self.attention_backend:
                arguments["speculative_draft_attention_backend"] = backend
        chosen = {name: value for name, value in self.arguments.items() if draft or not name.startswith("speculative_")}
        return arguments | chosen
