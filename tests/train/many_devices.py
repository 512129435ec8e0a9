"""One short run on any mesh, without a loop around it: rows, staging and programs as in training, states of a table.

Imported by tests, and run by them in processes of their own, where there are eight devices or several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from draft_jax.config import DraftConfig
from draft_jax.objective.config import ObjectiveConfig
from target_bridge import handoff
from target_bridge.staging import StagingRing
from target_bridge.target import Capture
from train.checkpoint import Checkpoints, Saved
from train.config import CheckpointConfig, OptimizerConfig
from train.data.rows import RowIterator
from train.data.samples import Sample
from train.feeding import Feeder
from train.optimizer import make_optimizer, make_schedule
from train.sharding import Placement, head_sharding, make_mesh, row_share
from train.state import TrainState, abstract_state, new_state
from train.step import Programs, StepOptions, lower_programs

VOCAB, LENGTH, ROWS, STEPS, SAVED_AT = 64, 24, 8, 10, 5
DRAFT = DraftConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    block_size=4,
    mask_token_id=5,
    markov_rank=8,
    markov_head_type="gated",
    initializer_range=0.2,
    max_position_embeddings=128,
)
OBJECTIVE = ObjectiveConfig(num_anchors=5, chunk_rows=16)  # 5 anchors: not a multiple of the devices of a row
OPTIMIZER = OptimizerConfig()  # the rates of a real run


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of so many devices, and what is split over it."""

    devices: int
    fsdp: int = 1
    seq: int = 1
    placement: Placement = dataclasses.field(default_factory=Placement)


ONE = Layout(1)
MOMENTS = Placement("sharded_moments")
#: Whole gradients kept for a window, and the head split as well: the options of `fully_sharded`.
OPTIONS = Placement("fully_sharded", split_accumulator=False, split_head=True)
#: By name; the number is that of all devices.
LAYOUTS = {
    "1": ONE,
    "8 replicated": Layout(8),
    "8 moments": Layout(8, placement=MOMENTS),
    "8 full": Layout(8, fsdp=4),
    "8 seq": Layout(8, seq=2),
    "4 full seq": Layout(4, fsdp=2, seq=2),
    "2 full": Layout(2, fsdp=2, placement=OPTIONS),
}


def several(size: int) -> dict[str, Layout]:
    """The modes on `size` processes of one device."""
    return {
        "replicated": Layout(size),
        "moments": Layout(size, placement=MOMENTS),
        "full": Layout(size, fsdp=2),
        "seq": Layout(size, seq=2),
    }


@functools.cache
def samples() -> list[Sample]:
    """Ragged documents for nine batches of eight rows and three rows more. In the order they are trained on.

    Rows 4..7 of the third batch, which belong to the last half of the devices, teach nothing; the last batch has no
    rows for them at all. Every second document is so short that the second half of its row is padding.
    """
    rng = np.random.default_rng(7)
    found = []
    for i in range((STEPS - 1) * ROWS + 3):
        length = int(rng.integers(8, LENGTH // 2 + 1) if i % 2 else rng.integers(LENGTH // 2, LENGTH + 1))
        mask = np.ones(length, np.int8)
        mask[: length // 3] = 0
        if i // ROWS == 2 and i % ROWS >= ROWS // 2:
            mask[:] = 0
        found.append(Sample(f"s{i}", rng.integers(6, VOCAB, length).astype(np.int32), mask))
    return found


def table(rows: int, width: int, seed: int) -> torch.Tensor:
    """Random numbers that stand for what a target knows."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32))


class TableTarget:
    """States that depend on a token and its position alone."""

    info = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self) -> None:
        width = DRAFT.hidden_size
        self._context, self._last = table(VOCAB, DRAFT.num_taps * width, 1), table(VOCAB, width, 2)
        self._at = table(LENGTH, 1, 3)

    def capture(self, documents: list[np.ndarray]) -> Capture:
        context, last = [], []
        for ids in documents:
            at = self._at[: len(ids)]
            context.append(self._context[torch.from_numpy(ids).long()] + at)
            last.append(self._last[torch.from_numpy(ids).long()] - at)
        return Capture(context, last)


def options_of(layout: Layout) -> StepOptions:
    """What the programs of a layout compute."""
    return StepOptions(
        DRAFT,
        OBJECTIVE,
        make_optimizer(OPTIMIZER),
        make_schedule(OPTIMIZER, STEPS),
        jnp.dtype("float32"),
        placement=layout.placement,
    )


class Run:
    """A run on one layout: programs, and where it stands.

    Args:
        layout: devices and modes.
        devices: of the mesh, in order.
        rank: of this process.
        size: of how many.
    """

    def __init__(self, layout: Layout, devices: list[Any], rank: int = 0, size: int = 1) -> None:
        self.layout, self.options = layout, options_of(layout)
        self.mesh = make_mesh(devices, layout.fsdp, layout.seq)
        head = table(VOCAB, DRAFT.hidden_size, 4)
        self.frozen = handoff.frozen_to_jax(head, head, head_sharding(self.mesh, layout.placement))
        self.share = row_share(rank, size, layout.devices // size, layout.seq)
        self.lowered, self._batch = lower_programs(
            self.options, self.mesh, rows=ROWS, length=LENGTH, frozen=self.frozen, hidden_dtype=jnp.dtype("float32")
        )
        self.programs: Any = None

    def compile(self) -> None:
        """Compile what was lowered; may run in a thread."""
        compiled = {name: program.compile() for name, program in self.lowered.items()}
        self.programs = Programs(**compiled, batch=self._batch, compile_seconds=0.0)

    def abstract(self) -> TrainState:
        """Shapes and places of the state."""
        return abstract_state(DRAFT, self.options.optimizer, self.mesh, self.layout.placement)

    def begin(self, state: TrainState | None = None, position: Any = None) -> None:
        """Stand at step 0, or where a state and a position of the data say."""
        if state is None:
            state = new_state(DRAFT, self.options.optimizer, 1, self.mesh, placement=self.layout.placement)
        rows = RowIterator(samples(), ROWS, LENGTH, shuffle=False, epochs=1, share=(self.share.index, self.share.count))
        if position is not None:
            rows.set_state(position)
        width = DRAFT.hidden_size
        tokens = LENGTH // self.share.parts
        ring = StagingRing(1, ROWS // self.share.count, tokens, DRAFT.num_taps * width, width)
        first = self.share.part * tokens
        self.feeder = Feeder(rows, TableTarget(), ring, self.mesh, sanitize=True, first_token=first)  # type: ignore[arg-type]
        self.state, self.accumulator = state, self.programs.start(state.params)

    def step(self) -> dict[str, float]:
        """One optimizer step of one micro-step; its loss and gradient norm."""
        with self.feeder.next_batch() as (_, batch, slot):
            self.accumulator = self.programs.accumulate(
                self.state.params, self.frozen, batch, self.state.key, self.state.step, self.accumulator
            )
            slot.fence(self.accumulator)
        self.state, self.accumulator, metrics = self.programs.apply(self.state, self.accumulator)
        sums = {name: np.asarray(value) for name, value in metrics.sums.items()}
        return {
            "loss": float(sums["loss_num"] / sums["loss_den"]),
            "grad_norm": float(metrics.values["grad_norm"]),
            "anchors": float(sums["sampled_anchors"]),
            "slots": float(sums["anchor_slots"]),
        }

    def curve(self, folder: Path | None = None) -> list[dict[str, float]]:
        """All steps from the start; saves the state after step `SAVED_AT` if a folder is given."""
        self.begin()
        found = []
        for number in range(1, STEPS + 1):
            found.append(self.step())
            if folder is not None and number == SAVED_AT:
                checkpoints = Checkpoints(folder, CheckpointConfig())
                checkpoints.save(self.state, Saved(number, self.feeder.position, {}, {}), {})
                checkpoints.close()
        return found

    def restore(self, checkpoints: Checkpoints) -> None:
        """Stand where another run saved."""
        state, saved = checkpoints.restore(SAVED_AT, self.abstract())
        self.begin(state, saved.position)


def on_host(state: TrainState) -> list[np.ndarray]:
    """Every number of a state whose parts are all in this process."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state, state.step, state.key))]


def compiled(layouts: dict[str, Layout], devices: list[Any], rank: int = 0, size: int = 1) -> dict[str, Run]:
    """Runs on all layouts; their programs are compiled two at a time."""
    runs = {name: Run(layout, devices[: layout.devices], rank, size) for name, layout in layouts.items()}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Run.compile, runs.values()))
    return runs


def matrix(folder: Path) -> dict[str, Any]:
    """Curves on every layout of one process; then what each saved restored onto others, and a step further.

    Restored are: all on themselves; those of eight devices on all; all others on those of eight.

    Returns:
        `curves` by layout; `pairs` by "saved on -> restored on": whether the restored state is that which was saved,
        bit for bit, and how far the step after it is from that of the run that was never interrupted: loss and
        gradient norm relative, parameters and moments absolute.
    """
    runs = compiled(LAYOUTS, jax.devices())
    curves = {name: run.curve(folder / name) for name, run in runs.items()}
    stored = {name: Checkpoints(folder / name, CheckpointConfig()) for name in runs}
    saved, after = {}, {}
    for name, run in runs.items():
        run.begin()
        for _ in range(SAVED_AT):
            run.step()
        saved[name] = on_host(run.state)
        assert run.step() == curves[name][SAVED_AT], name
        after[name] = on_host(run.state)
    pairs = {}
    for source in runs:
        for name, run in runs.items():
            if source != name and 8 not in (run.layout.devices, runs[source].layout.devices):
                continue
            run.restore(stored[source])
            restored = on_host(run.state)
            now, was = run.step(), curves[source][SAVED_AT]
            state = on_host(run.state)
            pairs[f"{source} -> {name}"] = {
                "restored": same_bits(restored, saved[source]),
                "bits": now == was and same_bits(state, after[source]),
                "loss": abs(now["loss"] / was["loss"] - 1),
                "grad_norm": abs(now["grad_norm"] / was["grad_norm"] - 1),
                "state": max(
                    float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(state, after[source], strict=True)
                ),
            }
    for checkpoints in stored.values():
        checkpoints.close()
    return {"curves": curves, "pairs": pairs}


def same_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    """Whether all arrays are equal, signs of zeros included."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


def processes(folder: Path, sources: list[str], world: Any, devices: list[Any]) -> dict[str, Any]:
    """Curves of the modes on several processes, and for each the step after a checkpoint of one process."""
    layouts = several(world.size)
    # The first one compiles and writes the cache, the others read it: as many programs as with one process.
    if world.is_first:
        runs = compiled(layouts, devices, world.rank, world.size)
    world.barrier("compiled")
    if not world.is_first:
        runs = compiled(layouts, devices, world.rank, world.size)
    world.barrier("ready")  # the first collective waits for all processes for 30 s only
    found: dict[str, Any] = {"curves": {}, "resumed": {}}
    stored = {source: Checkpoints(folder / source, CheckpointConfig()) for source in sources}
    for name, run in runs.items():
        found["curves"][name] = run.curve()
        for source in sources:
            run.restore(stored[source])
            found["resumed"][f"{source} -> {name}"] = run.step()
    for checkpoints in stored.values():
        checkpoints.close()
    return found


def main() -> None:
    """`many_devices.py FOLDER [SOURCE ...]`: `matrix` in one process, `processes` in several; prints JSON."""
    import sys

    from train.distributed import World, check_devices, start_jax, stop_jax
    from train.topology import Topology

    jax.config.update("jax_disable_most_optimizations", True)
    folder, sources = Path(sys.argv[1]), sys.argv[2:]
    topology = Topology.from_environment()
    if topology.world_size == 1:
        print("RESULT", json.dumps(matrix(folder)), flush=True)
        return
    world = World(topology)
    start_jax(topology)
    found = processes(folder, sources, world, check_devices(world, 1))
    print("RESULT", json.dumps(found), flush=True)
    world.close()
    stop_jax(topology)


if __name__ == "__main__":
    main()
