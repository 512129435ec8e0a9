"""The feeder alone: a batch without documents."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from target_bridge.staging import StagingRing
from target_bridge.target import Capture
from train.data.rows import fill_rows
from train.feeding import Feeder
from train.sharding import make_mesh


class Rows:
    """A stream of batches that hold nothing: what a rank gets whose data have run out."""

    def get_state(self):
        return {}

    def __next__(self):
        return fill_rows([[], []], 2, 8)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_shared_target_is_asked_also_without_documents(lockstep):
    """Ranks that share a target wait for one another in every capture; a target of one's own is not troubled."""
    asked = []

    def capture(documents):
        asked.append(list(documents))
        return Capture([], [])

    target = SimpleNamespace(capture=capture, info=SimpleNamespace(vocab_size=10), lockstep=lockstep)
    ring = StagingRing(1, 2, 8, 6, 3)
    feeder = Feeder(Rows(), target, ring, make_mesh(jax.devices("cpu")[:1], 1), sanitize=True)
    with feeder.next_batch() as (_, batch, slot):
        assert not np.asarray(batch.context_hidden).any()
        slot.fence(batch.input_ids + 1)
    assert asked == ([[]] if lockstep else [])
