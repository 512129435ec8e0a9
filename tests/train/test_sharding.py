"""Where things live: rules of names, what divides and what does not, meshes, rows of a process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from benchmarks.scaling import sent_bytes
from draft_jax.models.dspark import abstract_params
from train.config import ConfigError, OptimizerConfig
from train.config_file import build
from train.optimizer import make_optimizer
from train.resolve import check_division
from train.sharding import (
    AXES,
    Placement,
    RowShare,
    ShardingError,
    layout_of,
    make_mesh,
    path_of,
    place,
    row_share,
    split_of,
    splits,
    state_shardings,
)
from train.state import abstract_state

ROOT = Path(__file__).resolve().parents[2]
ONE = make_mesh(jax.devices()[:1])


def mesh(data=1, fsdp=1, seq=1) -> AbstractMesh:
    return AbstractMesh((data, fsdp, seq), AXES)


def state_of(draft):
    return abstract_state(draft, make_optimizer(OptimizerConfig()), ONE)


def specs(tree) -> dict[str, P]:
    return {path_of(path): leaf.spec for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_moments_live_where_the_rules_put_their_parameter(tiny_draft):
    found = specs(state_shardings(state_of(tiny_draft), mesh(2, 4), Placement("fully_sharded")))
    moments = [path for path in found if path.startswith("opt_state/") and not path.endswith("count")]
    assert len(moments) == 2 * len(jax.tree.leaves(abstract_params(tiny_draft)))
    for path in moments:
        parameter = re.sub(r"^opt_state/.*?(mu|nu)/", "params/", path)
        assert found[path] == found[parameter], path
    assert found["params/layers/0/mlp/down_proj/kernel"] == P("fsdp", None)
    assert found["step"] == found["key"] == P()


def test_sharded_moments_leave_parameters_whole(tiny_draft):
    found = specs(state_shardings(state_of(tiny_draft), mesh(2, 1, 2), Placement("sharded_moments")))
    assert all(spec == P() for path, spec in found.items() if path.startswith("params/"))
    split = [path for path, spec in found.items() if split_of(spec)[1]]
    assert all(path.startswith("opt_state/") for path in split)
    assert found[split[0]] == P(AXES, None)
    # Every matrix of more than one column, twice; 61 tokens of vocabulary divide by columns only.
    assert len(split) == 2 * sum(splits(path_of(p)) for p, _ in jax.tree_util.tree_leaves_with_path(
        abstract_params(tiny_draft)))  # fmt: skip


def test_the_sum_of_gradients_has_one_part_for_every_holder(tiny_draft):
    params = abstract_params(tiny_draft)
    kernel, scale = params["fc"]["kernel"], params["norm"]["scale"]

    def shapes(placement, *sizes):
        placed = place(params, mesh(*sizes), placement)
        return tuple(
            at.partial_shape(leaf).sharding.shard_shape(at.partial_shape(leaf).shape)
            for at, leaf in ((placed["fc"]["kernel"], kernel), (placed["norm"]["scale"], scale))
        )

    whole = ((1, *kernel.shape), (1, *scale.shape))
    assert shapes(Placement(), 8) == shapes(Placement("sharded_moments"), 2, 1, 4) == whole
    assert shapes(Placement("fully_sharded"), 2, 4) == ((1, kernel.shape[0] // 4, kernel.shape[1]), whole[1])
    assert shapes(Placement("fully_sharded", split_accumulator=False), 2, 4) == whole


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ShardingError, match=r"no rule says where parameter params/adapter/weight lives; add one"):
        layout_of("params/adapter/weight", (8, 8), ("fsdp",), mesh(1, 2))
    params = {"fc": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32), "kernels": jnp.zeros(3)}}
    with pytest.raises(ShardingError, match=r"parameter fc/kernels lives"):
        place(params, ONE)


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("fc/kernel", (12, 8), P("fsdp", None)),
        ("fc/kernel", (10, 8), P(None, "fsdp")),  # the rows do not divide
        ("markov/markov_w2/embedding", (61, 6), P()),  # neither do
        ("params/layers/3/self_attn/q_norm/scale", (64,), P()),  # a vector, though it would divide
        ("confidence/proj/kernel", (64, 1), P()),
        ("opt_state/1/nu/markov/gate_proj/bias", (64,), P()),
    ],
)
def test_layouts(path, shape, expected):
    assert layout_of(path, shape, ("fsdp",), mesh(1, 4)) == expected
    assert layout_of(path, shape, (), mesh(1, 4)) == P()


def test_modes_that_do_not_fit_the_mesh():
    assert Placement().mode_on(mesh(2, 4)) == "fully_sharded"
    assert Placement().mode_on(mesh(8)) == "replicated"
    with pytest.raises(ShardingError, match=r"train\.sharding is 'sharded_moments' and train\.fsdp 4"):
        Placement("sharded_moments").mode_on(mesh(2, 4))
    with pytest.raises(ShardingError, match=r"train\.fsdp is 2 and train\.seq 1; their product must divide the 1 dev"):
        make_mesh(jax.devices()[:1], 2)


def test_rows_and_parts_of_a_process():
    """Two processes of four devices each hold whole rows; of one device, or two, they share them."""
    assert [row_share(rank, 2, 4, 2) for rank in (0, 1)] == [RowShare(0, 2), RowShare(1, 2)]
    assert [row_share(rank, 4, 1, 2) for rank in range(4)] == [
        RowShare(0, 2, 0, 2), RowShare(0, 2, 1, 2), RowShare(1, 2, 0, 2), RowShare(1, 2, 1, 2),
    ]  # fmt: skip
    assert row_share(3, 4, 2, 8) == RowShare(0, 1, 3, 4)
    with pytest.raises(ShardingError, match=r"train\.seq is 2 and there are 2 processes of 3 devices"):
        row_share(0, 2, 3, 2)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"sharding": "sharded_moments", "fsdp": 2}, r"train\.fsdp is 2; train\.sharding is 'sharded_moments'"),
        ({"sharding": "fully_sharded"}, r"train\.fsdp is 1; train\.sharding is 'fully_sharded'"),
        ({"split_head": True}, r"train\.split_head is True; .*leave it out"),
        ({"split_accumulator": False}, r"train\.split_accumulator is False; .*leave it out"),
        ({"seq": 0}, r"train\.seq is 0; give a positive integer"),
    ],
)
def test_configurations_that_cannot_be_meant(plain_tree, change, train, message):
    with pytest.raises(ConfigError, match=message):
        build(change(plain_tree, **{f"train__{name}": value for name, value in train.items()}))


def test_numbers_that_do_not_divide(plain_tree, change):
    def check(devices, **changes):
        check_division(build(change(plain_tree, **changes)), devices)

    check(8, train__seq=4, train__batch_rows=2)
    with pytest.raises(ConfigError, match=r"train\.batch_rows is 2; .* the 8 devices .*, divided by train\.seq 2"):
        check(8, train__seq=2, train__batch_rows=2)
    with pytest.raises(ConfigError, match=r"train\.fsdp is 2 times train\.seq 2; it must divide the 6 devices"):
        check(6, train__seq=2, train__fsdp=2, train__batch_rows=6)
    with pytest.raises(ConfigError, match=r"train\.seq is 5; it must divide the 24 tokens of a row"):
        check(5, train__seq=5)


def test_bytes_sent_by_hand():
    """Rings of 4: an all-reduce of 64 bytes sends 96, an all-gather of 64 sends 48, a reduce-scatter to 16 too."""
    program = """
  %a = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}
  %b = (f32[4]{0}, f32[16]{0}) all-gather-start(%y)
  %c = f32[16]{0} all-gather-done(%b)
  ROOT %d = bf16[8]{0:T(8)} reduce-scatter(%z), dimensions={0}
  %e = f32[16]{0} add(%a, %c)
"""
    assert sent_bytes(program, 4) == 96 + 48 + 48
    assert sent_bytes(program, 1) == 0


TRAFFIC = """
import json
import jax, jax.numpy as jnp
jax.config.update("jax_disable_most_optimizations", True)
from benchmarks.scaling import MODES, sent_bytes
from benchmarks.shapes import Sizes
from draft_jax.batch import FrozenHead
from draft_jax.objective.config import ObjectiveConfig
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule
from train.sharding import make_mesh
from train.step import StepOptions, lower_programs

draft = Sizes(hidden=64, mlp=128, heads=4, kv_heads=2, head_dim=16, vocab=128, layers=1, taps=2, block=3,
              markov_rank=8).draft()
head = jax.ShapeDtypeStruct((128, 64), jnp.float32)
found = {}
for name, program in (("replicated", "apply"), ("sharded_moments", "apply"), ("fully_sharded", "accumulate"),
                      ("whole_sums", "apply")):
    mode = MODES[name]
    mesh = make_mesh(jax.devices(), 2 if mode.grouped else 1)
    options = StepOptions(draft, ObjectiveConfig(num_anchors=4, chunk_rows=8), make_optimizer(OptimizerConfig()),
                          make_schedule(OptimizerConfig(), 10), jnp.dtype("float32"), placement=mode.placement)
    programs = lower_programs(options, mesh, rows=2, length=16, frozen=FrozenHead(head, head),
                              hidden_dtype=jnp.float32)[0]
    found[name] = sent_bytes(programs[program].compile().as_text(), 2)
size = 4 * sum(leaf.size for leaf in jax.tree.leaves(programs["accumulate"].in_avals[0][0]))
print(json.dumps({"found": found, "size": size}))
"""


def test_what_each_mode_sends():
    """Of S bytes of gradients two devices send S once per update: halves out and halves back. Fully sharded in float32
    they do so in every micro-step; with a whole sum only the halves out are left to the update."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRAFFIC], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    shares = {name: sent / told["size"] for name, sent in told["found"].items()}
    # Norms, sums of metrics and what stays whole come on top.
    expected = {"replicated": 1, "sharded_moments": 1, "fully_sharded": 1, "whole_sums": 0.5}
    assert shares == pytest.approx(expected, abs=0.05)
