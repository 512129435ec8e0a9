"""What an evaluation may be told. Plain values only: this module comes with every run's configuration."""

from dataclasses import dataclass
from typing import Literal

#: Temperatures below this are greedy decoding (dspark_spec 5.1, step 3).
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class EvalConfig:
    """Options of one evaluation (dspark_spec 5.1).

    Attributes:
        prompts: JSONL file of prompts; None = the prompts shipped with the package.
        limit: at most this many prompts, taken from the start of the file; None = all.
        max_new_tokens: tokens generated per prompt, the first one (from the prefill) included.
        temperature: applied to draft and target alike; below 1e-5 both are greedy.
        confidence_threshold: propose only the slots before the first whose predicted acceptance is below
            this; 0 = always propose the whole block. Needs a draft with a confidence head when above 0.
        seed: with the prompt's id, the whole randomness of that prompt; no other prompt or order matters.
        dtype: compute dtype of target and draft: float32, bfloat16, or auto (bfloat16 on an accelerator,
            float32 on a CPU). Only float32 promises the tokens of plain greedy decoding.
        plain: decode the same prompts without the draft too: the speed to compare with and, at temperature 0,
            the tokens to be equal to.
        max_context: refuse prompts that do not fit in this many tokens, and stop outputs there; None = what
            target and draft can address.
        template: chat template of the prompts, as `data.template`: auto = the tokenizer's own.
        batch_size: prompts decoded side by side; it changes the speed, not the results. None = by the device.
        every: while training, evaluate after every so many optimizer steps; 0 = never.
        seed_by: what a prompt's randomness hangs on besides the seed: its id, or (as DeepSpec) its place in its task.
        draft_sampling: dtype of the distribution draft tokens are drawn from. bfloat16 reproduces DeepSpec's evaluator
            and is not lossless (dspark_spec 8.2, defect 2).
        count_overshoot: count what the last round committed past max_new_tokens, as DeepSpec does (defect 6).
    """

    prompts: str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    confidence_threshold: float = 0.0
    seed: int = 980406
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    plain: bool = True
    max_context: int | None = None
    template: str = "auto"
    batch_size: int | None = None
    every: int = 0
    seed_by: Literal["prompt", "index"] = "prompt"
    draft_sampling: Literal["float32", "bfloat16"] = "float32"
    count_overshoot: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"eval.max_new_tokens is {self.max_new_tokens}; at least 1 token must be generated")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"eval.temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ValueError(
                f"eval.confidence_threshold is {self.confidence_threshold}; it is a probability, give 0 to 1"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"eval.limit is {self.limit}; give a positive number, or leave it out for all prompts")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"eval.max_context is {self.max_context}; a prompt and a new token need at least 2")
        if self.seed < 0:
            raise ValueError(f"eval.seed is {self.seed}; give a non-negative integer")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"eval.dtype is {self.dtype!r}; choose auto, float32 or bfloat16")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"eval.batch_size is {self.batch_size}; give a positive number, or leave it out")
        if self.every < 0:
            raise ValueError(f"eval.every is {self.every}; give 0 (never) or a number of optimizer steps")
        if self.seed_by not in ("prompt", "index"):
            raise ValueError(f"eval.seed_by is {self.seed_by!r}; choose prompt or index")
        if self.draft_sampling not in ("float32", "bfloat16"):
            raise ValueError(f"eval.draft_sampling is {self.draft_sampling!r}; choose float32 or bfloat16")

    @property
    def greedy(self) -> bool:
        """Whether this temperature means greedy decoding."""
        return self.temperature < GREEDY_BELOW
