"""A plan on paper: step time, traffic and memory of a run on many GPUs, from what one GPU was measured to do.

    python -m benchmarks.scale                                  # both drafts at 8, 64 and 512 GPUs: docs/scale.md
    python -m benchmarks.scale --shape qwen3-8b --target-ms 130 --network 22

Nothing is measured here. Times of the draft's programs are those of RESULTS.md, link rates and the target's forward are
options; nothing is taken to overlap. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.shapes import DEFAULTS, TARGETS, Sizes
from draft_jax.config import DraftConfig
from draft_jax.cost import Shape, layer_parameters, step_memory

Mode = Literal["replicated", "sharded_moments", "fully_sharded"]
MODES: tuple[Mode, ...] = ("replicated", "sharded_moments", "fully_sharded")

#: Of one row of 4096 tokens, 512 anchors x 7, bf16, on one H200: benchmarks/RESULTS.md.
LENGTH, ANCHORS = 4096, 512
#: The rate the draft's own step reaches on an H200, taken for a dense target's forward where none is measured [FLOP/s].
DENSE_RATE = 550e12
#: Assumed of a mixture of experts in FP8 over the GPUs of a host, each [FLOP/s].
EXPERTS_RATE = 300e12


@dataclass(frozen=True)
class Work:
    """What one GPU does, and was measured to take.

    Attributes:
        shape: name in `shapes.TARGETS`.
        micro_ms: one micro-step of the draft.
        apply_ms: one optimizer step on whole parameters.
        active: parameters of the target that a token meets, without the embedding.
        weight_bytes: of the target.
        tensor_parallel: GPUs that share one copy of the target.
        target_rate: operations a second and GPU of the target's forward.
        source: where `active` and `weight_bytes` come from.
    """

    shape: str
    micro_ms: float
    apply_ms: float
    active: float
    weight_bytes: float
    tensor_parallel: int
    target_rate: float
    source: str

    @property
    def draft(self) -> DraftConfig:
        """The draft of that target."""
        return Sizes(**(DEFAULTS | TARGETS[self.shape])).draft()

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(math.prod(shape) for shape in self.draft.parameter_shapes().values())

    @property
    def target_ms(self) -> float:
        """Forward of the target, in milliseconds for each row of each GPU: 2 operations per active parameter and token.

        `tensor_parallel` GPUs work together on as many rows, so that each does one row's operations all the same.
        Attention (5 to 10 % at 4096 tokens) is not counted.
        """
        return 2 * self.active * LENGTH / self.target_rate * 1e3


WORK = {
    "qwen3-8b": Work(
        "qwen3-8b", 71.4, 16.5, 6.95e9, 16.4e9, 1, DENSE_RATE, "model card of Qwen3-8B: 8.2 B, 6.95 B without embedding"
    ),
    "glm-5.2": Work(
        "glm-5.2", 102.0, 23.8, 40e9, 744e9, 8, EXPERTS_RATE, "GLM-5 report: 744 B, 40 B active; FP8, a byte each"
    ),
}


@dataclass(frozen=True)
class Links:
    """Rates a GPU sends at [bytes/s] and times of a hop [s].

    Attributes:
        nvlink: within a host.
        network: between hosts; every GPU has its own adapter.
        per_host: GPUs of a host.
        nvlink_hop, network_hop: latency of one step of a ring.
        agree_hop: one of the 2 log2(n) hops of the agreement over the host network.
    """

    nvlink: float = 360e9
    network: float = 45e9
    per_host: int = 8
    nvlink_hop: float = 5e-6
    network_hop: float = 10e-6
    agree_hop: float = 1e-4


@dataclass(frozen=True)
class Traffic:
    """What one GPU sends: bytes, and the hops it takes.

    Attributes:
        nvlink, network: bytes.
        nvlink_hops, network_hops: steps of rings, one after another.
    """

    nvlink: float = 0.0
    network: float = 0.0
    nvlink_hops: int = 0
    network_hops: int = 0

    def seconds(self, links: Links) -> float:
        """The parts one after another, none of it under computation."""
        sending = self.nvlink / links.nvlink + self.network / links.network
        return sending + self.nvlink_hops * links.nvlink_hop + self.network_hops * links.network_hop


def half_ring(members: int, size: float) -> float:
    """Bytes each of `members` sends in a reduce-scatter or an all-gather of `size` bytes; an all-reduce is both."""
    return (members - 1) / members * size


def update_traffic(devices: int, size: float, mode: Mode, links: Links) -> Traffic:
    """Of one optimizer step: all devices' sums of gradients, `size` bytes each, once.

    Within a host a reduce-scatter and an all-gather over NVLink; between hosts each GPU all-reduces its share of the
    sums with those of its number. `sharded_moments` scatters the sums and gathers the new parameters, as many bytes.
    `fully_sharded` (over the GPUs of a host) has scattered within the host already, in each micro-step.
    """
    inside = min(devices, links.per_host)
    hosts = devices // inside
    network = 2 * half_ring(hosts, size / inside)
    if mode == "fully_sharded":
        return Traffic(0.0, network, 0, 2 * (hosts - 1))
    return Traffic(2 * half_ring(inside, size), network, 2 * (inside - 1), 2 * (hosts - 1))


def micro_step_traffic(devices: int, size: float, mode: Mode, links: Links) -> Traffic:
    """Of one micro-step: nothing, but with `fully_sharded` parameters gathered and gradients scattered in the host."""
    if mode != "fully_sharded":
        return Traffic()
    inside = min(devices, links.per_host)
    return Traffic(nvlink=2 * half_ring(inside, size), nvlink_hops=2 * (inside - 1))


@dataclass(frozen=True)
class Update:
    """One optimizer step of a run.

    Attributes:
        seconds: of it.
        exchange: of that, in traffic between GPUs and the agreement of the hosts.
        alone: what one GPU would take for its micro-steps and the optimizer step.
        per_update, per_micro_step: traffic.
    """

    seconds: float
    exchange: float
    alone: float
    per_update: Traffic
    per_micro_step: Traffic


def update(work: Work, devices: int, micro_steps: int, mode: Mode, links: Links, target_ms: float) -> Update:
    """Time and traffic of an optimizer step of `micro_steps` rows on each of `devices` GPUs."""
    size = 4.0 * work.parameters
    once, each = update_traffic(devices, size, mode, links), micro_step_traffic(devices, size, mode, links)
    alone = (micro_steps * (target_ms + work.micro_ms) + work.apply_ms) / 1e3
    agreement = 2 * math.log2(devices) * links.agree_hop
    exchange = once.seconds(links) + micro_steps * each.seconds(links) + agreement
    return Update(alone + exchange, exchange, alone, once, each)


def memory(work: Work, devices: int, mode: Mode, links: Links) -> dict[str, float]:
    """Bytes of one GPU by purpose; what NCCL and the target's caches take comes on top."""
    draft, parameters = work.draft, work.parameters
    inside = min(devices, links.per_host)
    split = inside if mode == "fully_sharded" else 1
    shape = Shape(1, LENGTH, ANCHORS)
    kernels = layer_parameters(draft) * draft.num_hidden_layers + draft.num_taps * draft.hidden_size**2
    parts = {
        "parameters": 4 * parameters / split,
        "moments": 8 * parameters / (devices if mode == "sharded_moments" else split),
        "sums of gradients": 4 * parameters / split,
        "gathered parameters and gradients": 8.0 * parameters if split > 1 else 0.0,
        "kernels in bf16": 2.0 * kernels,
        # The target's own memory where a GPU holds all of it, else a copy gathered from those that share it.
        "embedding and head": 4.0 * draft.vocab_size * draft.hidden_size if work.tensor_parallel > 1 else 0.0,
        "captured states": 2.0 * LENGTH * (draft.num_taps + 1) * draft.hidden_size,
        "temporaries": float(sum(step_memory(draft, shape, "triton").values())),
        "target's weights": work.weight_bytes / work.tensor_parallel,
    }
    return {name: size for name, size in parts.items() if size}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def times(work: Work, devices: list[int], micro_steps: dict[int, int], modes, links: Links, target_ms: float) -> str:
    """The table of times and traffic."""
    rows = []
    for count in devices:
        for mode in modes:
            found = update(work, count, micro_steps[count], mode, links, target_ms)
            nvlink = found.per_update.nvlink + micro_steps[count] * found.per_micro_step.nvlink
            tokens = count * micro_steps[count] * LENGTH / found.seconds
            sent = [f"{nvlink / 1e9:.1f}", f"{found.per_update.network / 1e9:.2f}", f"{1e3 * found.exchange:.1f}"]
            speed = [f"{found.seconds:.3f}", f"{100 * found.alone / found.seconds:.1f} %", f"{tokens / 1e3:,.0f}"]
            windows = [str(count * micro_steps[count]), str(micro_steps[count])]
            rows.append([str(count), mode.replace("_", " "), *windows, *sent, *speed])
    header = ["GPUs", "mode", "rows", "micro-steps", "NVLink GB", "network GB", "exchange ms", "update s", "efficiency"]
    return table([*header, "1000 tokens/s"], rows)


def memories(work: Work, devices: list[int], links: Links) -> str:
    """The table of memory, GB of one GPU."""
    found = {(mode, count): memory(work, count, mode, links) for count in devices for mode in MODES}
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    # Only what the number of GPUs changes gets a column of its own.
    columns = [(mode, count) for mode in MODES for count in (devices if mode == "sharded_moments" else devices[:1])]
    header = ["GB", *(f"{m.replace('_', ' ')}{f', {n} GPUs' if m == 'sharded_moments' else ''}" for m, n in columns)]
    rows = [[name, *(f"{found[column].get(name, 0.0) / 1e9:.2f}" for column in columns)] for name in names]
    return table(header, [*rows, ["sum", *(f"{sum(found[column].values()) / 1e9:.1f}" for column in columns)]])


def plan(work: Work, devices: list[int], accumulation: int, rows: int, links: Links, target_ms: float | None) -> str:
    """All tables of one draft."""
    given = target_ms is not None
    forward = target_ms if target_ms is not None else work.target_ms
    origin = (
        "as given"
        if given
        else f"2 x {work.active / 1e9:g} B x {LENGTH} operations at {work.target_rate / 1e12:g} TFLOP/s"
    )
    whole = [count for count in devices if rows % count == 0]
    return "\n\n".join(
        [
            f"### {work.shape}",
            f"{work.parameters:,} trainable parameters, {4 * work.parameters / 1e9:.2f} GB of fp32 sums. For each row"
            f" of {LENGTH} tokens and {ANCHORS} anchors: target {forward:.0f} ms ({origin}; {work.source};"
            f" {work.tensor_parallel} GPU(s) to a copy), draft {work.micro_ms} ms; optimizer step {work.apply_ms} ms.",
            f"{accumulation} micro-steps of one row on every GPU, whatever their number:",
            times(work, devices, dict.fromkeys(devices, accumulation), MODES, links, forward),
            f"{rows} rows to an update, whatever the number of GPUs:",
            times(work, whole, {count: rows // count for count in whole}, MODES[:1], links, forward),
            memories(work, devices, links),
        ]
    )


def main() -> None:
    """Print the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    links = Links()
    parser.add_argument("--shape", nargs="+", choices=sorted(WORK), default=list(WORK))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512], help="GPUs, multiples of --per-host")
    parser.add_argument("--accumulation", type=int, default=16, help="micro-steps of an update, per GPU")
    parser.add_argument("--rows", type=int, default=512, help="rows of an update, over all GPUs, in the second table")
    parser.add_argument("--nvlink", type=float, default=links.nvlink / 1e9, help="GB/s a GPU sends within a host")
    parser.add_argument("--network", type=float, default=links.network / 1e9, help="GB/s a GPU sends between hosts")
    parser.add_argument("--per-host", type=int, default=links.per_host)
    parser.add_argument("--target-ms", type=float, help="measured forward of the target per row, instead of a guess")
    parser.add_argument("--micro-ms", type=float, help="instead of the measured micro-step")
    parser.add_argument("--apply-ms", type=float, help="instead of the measured optimizer step")
    given = parser.parse_args()
    if wrong := [count for count in given.devices if count > given.per_host and count % given.per_host]:
        parser.error(f"--devices {wrong[0]} is no multiple of --per-host {given.per_host}")
    links = replace(links, nvlink=given.nvlink * 1e9, network=given.network * 1e9, per_host=given.per_host)
    for name in given.shape:
        work = WORK[name]
        work = replace(work, micro_ms=given.micro_ms or work.micro_ms, apply_ms=given.apply_ms or work.apply_ms)
        print(plan(work, given.devices, given.accumulation, given.rows, links, given.target_ms) + "\n")


if __name__ == "__main__":
    main()
