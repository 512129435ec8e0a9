"""The configuration of a run: one frozen dataclass per noun, plain values only (read from YAML by config_file)."""

from dataclasses import dataclass, field
from typing import Any, Literal

from draft_jax.objective.config import ObjectiveConfig
from target_bridge.sglang.options import EngineOptions

from .collapse import SPAN
from .data.config import DataConfig
from .evaluate.config import EvalConfig


class ConfigError(ValueError):
    """A configuration that cannot be meant: the message names the dotted key, the value and the remedy."""


def _require(condition: bool, key: str, value: Any, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"{key} is {value!r}; {remedy}")


@dataclass(frozen=True)
class TargetConfig:
    """The model whose decoding shall become faster. It is run, never trained.

    Attributes:
        path: folder with config.json and weights, or a hub name.
        revision: hub revision; None = the hub's default.
        bridge: what runs it, in this process: `hf` = Transformers, `sglang` = stock SGLang (docs/sglang.md).
        sglang: options of the SGLang engine; without effect for `hf`.
        probe: with `sglang`, run `draft-jax probe` first, in seconds, and do not train if it fails.
        dtype: of the target's weights and forward: auto = bfloat16 on an accelerator, float32 on a CPU.
        device: auto (the accelerator JAX uses, else the CPU), cpu, cuda or cuda:N.
        trust_remote_code: run Python code that comes with the model.
        capture_cache_gib: host memory [GiB] for captured states, reused in later epochs; 0 = capture every time.
    """

    path: str
    revision: str | None = None
    bridge: Literal["hf", "sglang"] = "hf"
    sglang: EngineOptions = field(default_factory=EngineOptions)
    probe: bool = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    capture_cache_gib: float = 0.0

    def __post_init__(self):
        _require(bool(self.path), "target.path", self.path, "give a model folder or a hub name")
        _require(self.capture_cache_gib >= 0, "target.capture_cache_gib", self.capture_cache_gib, "give 0 or more")
        _require(
            self.sglang.tp_size == 1 or self.capture_cache_gib == 0,
            "target.capture_cache_gib",
            self.capture_cache_gib,
            "give 0 with target.sglang.tp_size above 1: its ranks capture together, whatever each has seen before",
        )
        _require(
            self.bridge == "sglang" or self.sglang == EngineOptions(),
            "target.sglang",
            self.sglang,
            f"target.bridge is {self.bridge!r}, so it would have no effect; set target.bridge: sglang or leave it out",
        )


@dataclass(frozen=True)
class DraftSpec:
    """The draft to train. None = the stated default, or what `init_draft` says when that is given.

    Attributes:
        layers: decoder layers of the draft; default 5.
        target_layer_ids: target layers whose outputs are tapped, sorted; default spread evenly (dspark_spec 1.8).
        num_taps: how many layers that spread has; default 5. Not together with target_layer_ids.
        block_size: tokens drafted at once; default 7.
        mask_token_id: id of the block's placeholder: a row of the embedding no text uses. Default: the first row
            past the tokenizer's last token, if the target has one; otherwise it must be given.
        markov_rank: rank of the Markov head, 0 = none; default 256.
        markov_head_type: default vanilla.
        enable_confidence_head: default true.
        confidence_head_with_markov: the confidence head also sees the previous token's Markov features; default
            true when both heads exist.
        intermediate_size: width of the MLP; default the target's.
        init_draft: folder of a draft (ours, DeepSpec's or SpecForge's) whose weights the run starts from.
    """

    layers: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    num_taps: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    markov_rank: int | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    intermediate_size: int | None = None
    init_draft: str | None = None

    def __post_init__(self):
        for name in ("layers", "num_taps", "block_size", "intermediate_size"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"draft.{name}", value, "give a positive integer, or leave it out")
        _require(
            self.num_taps is None or self.target_layer_ids is None,
            "draft.num_taps",
            self.num_taps,
            "leave it out when draft.target_layer_ids lists the layers",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps (dspark_spec 3).

    Attributes:
        lr: peak learning rate.
        lr_scale: multiplies the rate of every step; the schedule's shape does not change.
        warmup_ratio: share of all steps that rise linearly to the peak.
        weight_decay: decoupled, on matrices only (norm scales and biases never decay).
        betas: decay of first and second moment.
        eps: added to the root of the second moment.
        max_grad_norm: clip of the gradient's global norm.
        resume_rewarm_steps: steps over which the rate rises anew from 0 to what the schedule says, after a start from
            weights alone (draft.init_draft, resume: weights) and after a roll-back; 0 = at once.
        fused: on NVIDIA GPUs, the step of large parameters in one kernel of our own instead of XLA's
            (train/fused_update.py): the same arithmetic. Off until it has been measured.
    """

    lr: float = 6e-4
    lr_scale: float = 1.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    resume_rewarm_steps: int = 64
    fused: bool = False

    def __post_init__(self):
        _require(self.lr > 0, "optimizer.lr", self.lr, "give a positive rate")
        _require(self.lr_scale > 0, "optimizer.lr_scale", self.lr_scale, "give a positive factor")
        _require(0 <= self.warmup_ratio < 1, "optimizer.warmup_ratio", self.warmup_ratio, "give 0 <= ratio < 1")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "give 0 or more")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "give two numbers in [0, 1)")
        _require(self.eps > 0, "optimizer.eps", self.eps, "give a positive number")
        _require(self.max_grad_norm > 0, "optimizer.max_grad_norm", self.max_grad_norm, "give a positive norm")
        _require(
            self.resume_rewarm_steps >= 0,
            "optimizer.resume_rewarm_steps",
            self.resume_rewarm_steps,
            "give 0 (at once) or a number of steps",
        )


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what portions and in which precision.

    Attributes:
        steps: optimizer steps of the whole run; exclusive with epochs.
        epochs: passes over the data instead; steps = floor(epochs * rows / (batch_rows * accumulation)).
        batch_rows: rows [B] of one micro-step, over all devices of all processes.
        accumulation: micro-steps per optimizer step.
        stop_at: save and stop cleanly after this optimizer step, without changing the schedule (time slices).
        seed: parameters, anchors; the data order has data.seed.
        dtype: compute dtype of the draft; auto = bfloat16 on an accelerator, float32 on a CPU. Parameters, moments
            and the gradient accumulator are float32 always.
        attention: auto = `triton` (draft_jax/attention/triton.py) on NVIDIA GPUs where dtype and head dim allow it,
            else `xla`; a name insists.
        devices: devices of each process; the batch axis is spread over those of all processes. With GPUs and several
            processes (docs/multi_host.md) that is 1.
        sharding: what of the training state is split (train/sharding.py): replicated = nothing; sharded_moments =
            Adam's moments and the update, over all devices; fully_sharded = parameters, moments and accumulator, over
            groups of `fsdp`. auto = fully_sharded if fsdp > 1, else replicated.
        fsdp: of all devices, how many share one copy of parameters, moments and accumulator.
        split_accumulator: with fully_sharded; false = each device keeps a whole accumulator (4 bytes per parameter),
            and gradients are exchanged once per optimizer step instead of in every micro-step.
        split_head: the frozen embedding and head are split by rows of the vocabulary over `fsdp` devices, and gathered
            for each micro-step; without effect on a target's own copy of them.
        seq: devices that share each row, each with its part of the captured states: for contexts too long for one.
            Without a tensor-parallel target of the same size, each of their processes captures the row by itself.
        rematerialise: layers of the draft are computed again in the backward pass instead of kept: `--plan` says how
            much memory that saves and how many operations it costs.
        memory_fraction: share of the accelerator's memory JAX reserves when it starts.
        on_collapse: when a draft that had learned loses it within a few steps (train/collapse.py): ignore, warn, stop
            = end the run with what kind of collapse it is and which checkpoints are good, or rollback = go back to the
            last good checkpoint, re-warm the learning rate, and go on with the data behind the collapse.
        max_rollbacks: end the run at a collapse after so many roll-backs.
        watchdog_seconds: end the process, saying where it is, when a phase of the loop takes longer; 0 = never. None =
            1800 with several processes, never with one.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_rows: int = 1
    accumulation: int = 1
    stop_at: int | None = None
    seed: int = 42
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "xla", "triton"] = "auto"
    devices: int = 1
    sharding: Literal["auto", "replicated", "sharded_moments", "fully_sharded"] = "auto"
    fsdp: int = 1
    split_accumulator: bool = True
    split_head: bool = False
    seq: int = 1
    rematerialise: bool = False
    memory_fraction: float = 0.5
    on_collapse: Literal["ignore", "warn", "stop", "rollback"] = "warn"
    max_rollbacks: int = 3
    watchdog_seconds: float | None = None

    def __post_init__(self):
        _require(
            (self.steps is None) != (self.epochs is None),
            "train.steps / train.epochs",
            (self.steps, self.epochs),
            "give exactly one of the two",
        )
        for name in ("steps", "epochs", "stop_at"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"train.{name}", value, "give a positive number")
        for name in ("batch_rows", "accumulation", "devices", "fsdp", "seq"):
            _require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "give a positive integer")
        # Devices of one process that have rows of their own; those of all processes are counted when they meet.
        groups = max(1, self.devices // self.seq)
        _require(
            self.batch_rows % groups == 0,
            "train.batch_rows",
            self.batch_rows,
            f"make it a multiple of train.devices ({self.devices})"
            + (f" divided by train.seq ({self.seq})" if self.seq > 1 else ""),
        )
        _require(
            self.sharding in ("auto", "fully_sharded") or self.fsdp == 1,
            "train.fsdp",
            self.fsdp,
            f"train.sharding is {self.sharding!r}, which splits nothing over fsdp: give 1, or fully_sharded",
        )
        _require(
            self.sharding != "fully_sharded" or self.fsdp > 1,
            "train.fsdp",
            self.fsdp,
            "train.sharding is 'fully_sharded': give the number of devices to split over",
        )
        _require(
            self.split_accumulator or self.fsdp > 1,
            "train.split_accumulator",
            self.split_accumulator,
            "it is whole on every device anyway unless train.fsdp is above 1; leave it out",
        )
        _require(
            not self.split_head or self.fsdp > 1,
            "train.split_head",
            self.split_head,
            "it is split over train.fsdp devices, and that is 1; leave it out",
        )
        _require(0 <= self.seed < 2**32, "train.seed", self.seed, "give an integer in [0, 2**32)")
        _require(0 < self.memory_fraction < 1, "train.memory_fraction", self.memory_fraction, "give 0 < share < 1")
        _require(self.max_rollbacks >= 1, "train.max_rollbacks", self.max_rollbacks, "give at least 1")
        _require(
            self.watchdog_seconds is None or self.watchdog_seconds >= 0,
            "train.watchdog_seconds",
            self.watchdog_seconds,
            "give 0 (never) or a number of seconds",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept.

    Attributes:
        every: optimizer steps between checkpoints; 0 = only when the run ends or is interrupted.
        keep: latest checkpoints kept.
        keep_best: best ones kept besides.
        best_metric: metric that decides, over the steps since the checkpoint before. auto = accept_length, measured on
            the checkpoint itself, when `eval.every` is set, else tau_probabilistic.
        best_mode: max or min.
    """

    every: int = 500
    keep: int = 2
    keep_best: int = 1
    best_metric: str = "auto"
    best_mode: Literal["max", "min"] = "max"

    def __post_init__(self):
        _require(self.every >= 0, "checkpoint.every", self.every, "give 0 (only at the end) or a number of steps")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least the latest checkpoint must stay")
        _require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "give 0 or more")


@dataclass(frozen=True)
class LoggingConfig:
    """What is written while training; metrics.jsonl always is.

    Attributes:
        every: optimizer steps per line; sums are taken over all of them.
        trackers: any of tensorboard, wandb.
        wandb_project: project of the wandb run.
        progress: progress bar on stderr; None = only on a terminal.
    """

    every: int = 1
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    wandb_project: str = "draft-jax"
    progress: bool | None = None

    def __post_init__(self):
        _require(self.every >= 1, "logging.every", self.every, "give a positive number of steps")


@dataclass(frozen=True)
class RunConfig:
    """Everything one training run is told.

    Attributes:
        run_dir: folder the run leaves behind: config.yaml, draft_config.json, metrics.jsonl, checkpoints/.
        resume: never = a run_dir that already holds a run is refused; auto = continue from the last complete
            checkpoint if there is one, else start; must = refuse to start anew; weights = must, but take the parameters
            alone: moments are new and the learning rate re-warms (optimizer.resume_rewarm_steps), for a run whose
            optimizer state has gone wrong. Continue with auto afterwards.
    """

    target: TargetConfig
    data: DataConfig
    run_dir: str
    draft: DraftSpec = field(default_factory=DraftSpec)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=1.0))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    resume: Literal["never", "auto", "must", "weights"] = "never"

    def __post_init__(self):
        _require(bool(self.run_dir), "run_dir", self.run_dir, "give the folder the run shall leave behind")
        saves, evaluations = self.checkpoint.every, self.eval.every
        if self.train.on_collapse == "rollback":
            _require(
                saves > 0 and (self.checkpoint.keep - 1) * saves >= SPAN,
                "checkpoint.every / checkpoint.keep",
                (saves, self.checkpoint.keep),
                f"train.on_collapse: rollback needs a checkpoint from {SPAN} steps before the collapse is found: make"
                f" every x (keep - 1) at least {SPAN}",
            )
        if self.checkpoint.keep_best and self.best_metric == "accept_length":
            _require(
                evaluations > 0,
                "checkpoint.best_metric",
                "accept_length",
                "it is measured only while training evaluates: set eval.every",
            )
            _require(
                not saves or not (saves % evaluations and evaluations % saves),
                "eval.every",
                evaluations,
                f"checkpoint.every is {saves}: make one a multiple of the other, or no checkpoint has an accept length"
                " to be chosen by",
            )

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best checkpoint, `auto` resolved."""
        if self.checkpoint.best_metric != "auto":
            return self.checkpoint.best_metric
        return "accept_length" if self.eval.every else "tau_probabilistic"
