"""AdamW, its learning-rate schedule and the groups whose norms are logged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .config import OptimizerConfig

Schedule = Callable[..., jax.Array]

#: `TrainState.rewarm_from` of a run whose rate does not rise anew: a step so early that no ramp reaches step 0.
NEVER = -(2**30)


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Learning rate of each optimizer step (dspark_spec 3).

    With N = `total_steps` and W = int(warmup_ratio * N): `lr * (k + 1) / W` for k < W, then half a cosine
    `lr * (1 + cos(pi * (k - W) / (N - W))) / 2`. `lr_scale` multiplies the result and nothing else.

    A rate that re-warms from step S on is the same one times `(k - S + 1) / R` for k < S + R, R =
    `resume_rewarm_steps`: the schedule goes on below the ramp, and is what it ever was when the ramp has ended.

    Args:
        config: rates and warm-up.
        total_steps: optimizer steps of the whole run.

    Returns:
        Function of the 0-based step and the step the rate re-warms from (int32 scalars; the second one `NEVER` if left
        out) to the rate (float32 scalar), traceable.
    """
    if total_steps < 1:
        raise ValueError(f"a schedule over {total_steps} optimizer steps is empty; give at least 1")
    warmup = int(config.warmup_ratio * total_steps)

    def schedule(step: jax.Array, rewarm_from: jax.Array | int = NEVER) -> jax.Array:
        # Before it becomes a float: NEVER has more digits than float32 keeps, though none that matter.
        ramp = jnp.clip((step - rewarm_from + 1) / max(config.resume_rewarm_steps, 1), 0.0, 1.0)
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / max(warmup, 1)
        progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return config.lr_scale * config.lr * jnp.where(step < warmup, rising, falling) * ramp

    return schedule


@dataclass(frozen=True)
class Optimizer:
    """AdamW leaf by leaf (or part of a leaf): optax's Adam, decoupled decay, and the norm gradients are clipped to.

    The rate stays outside so that the schedule follows the run's own step, which also counts windows that update
    nothing, and not Adam's count, which does not.

    Attributes:
        adam: without rate and decay.
        weight_decay: times the parameter, added to Adam's direction; of leaves with two or more axes only.
        max_grad_norm: gradients of a larger global norm are scaled down to it.
        fused: large leaves on NVIDIA GPUs go through one kernel (`fused_update`).
    """

    adam: optax.GradientTransformation
    weight_decay: float
    max_grad_norm: float
    fused: bool = False

    def init(self, params: Any) -> optax.OptState:
        """State of step 0, moments zero, float32: that of clip, Adam and decay as a chain, which checkpoints hold."""
        decay = optax.add_decayed_weights(self.weight_decay, mask=jax.tree.map(lambda leaf: leaf.ndim >= 2, params))
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), self.adam, decay).init(params)

    def clip(self, norm: jax.Array) -> jax.Array:
        """Factor on gradients of this global norm."""
        return self.max_grad_norm / jnp.maximum(norm, self.max_grad_norm)

    def direction(
        self, gradient: jax.Array, count: jax.Array, param: jax.Array, mu: jax.Array, nu: jax.Array, decays: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the rate multiplies, and the new moments; elementwise, so parts of leaves will do.

        Args:
            gradient: clipped.
            count: updates made before.
            param: float32.
            mu: first moment.
            nu: second moment.
            decays: whether the leaf these are of has two or more axes.
        """
        direction, state = self.adam.update(gradient, optax.ScaleByAdamState(count, mu, nu))
        if decays and self.weight_decay:
            direction += self.weight_decay * param
        return direction, state.mu, state.nu


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer of a run (dspark_spec 3)."""
    adam = optax.scale_by_adam(b1=config.betas[0], b2=config.betas[1], eps=config.eps, mu_dtype=jnp.float32)
    return Optimizer(adam, config.weight_decay, config.max_grad_norm, config.fused)


def group_of(path: tuple[Any, ...]) -> str:
    """Group of the parameter at a key path: norms, fc, layers, markov, confidence, or its own first key."""
    keys = [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]
    if any("norm" in key for key in keys):
        return "norms"
    for group in ("fc", "layers", "markov", "confidence"):
        if keys[0].startswith(group):
            return group
    return keys[0]


def squares_of(tree: Any) -> Any:
    """Sum of squares of each leaf, float32 scalars."""
    return jax.tree.map(lambda leaf: jnp.sum(jnp.square(leaf.astype(jnp.float32))), tree)


def group_norms(name: str, squares: Any) -> dict[str, jax.Array]:
    """Euclidean norm of each parameter group, float32 scalars by `name/group`.

    Args:
        name: of what they are norms.
        squares: tree of the parameters' sums of squares (`squares_of`).
    """
    groups: dict[str, jax.Array] = {}
    for path, square in jax.tree_util.tree_flatten_with_path(squares)[0]:
        group = group_of(path)
        groups[group] = groups.get(group, jnp.float32(0)) + square
    return {f"{name}/{group}": jnp.sqrt(value) for group, value in sorted(groups.items())}
