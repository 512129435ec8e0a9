"""The draft vocabulary of a dataset: counted once, kept under the key of everything it depends on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from draft_jax.vocabulary import DraftVocabulary, select_vocabulary

from .samples import Sample

_RULE = 1  # of select_vocabulary


def count_supervised(samples: Iterable[Sample], target_size: int) -> np.ndarray:
    """How often each id stands at a supervised position: int64 [target_size]."""
    counts = np.zeros(target_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.input_ids[sample.loss_mask > 0], minlength=target_size)
    return counts


def vocabulary_key(dataset_key: str, draft_size: int, target_size: int, always: Sequence[int] = ()) -> str:
    """A hash of all that decides a table: the rule, both sizes, the ids that must be in it, and the data's own key
    (which covers template, tokenizer and lengths, see `identity.dataset_key`)."""
    parts = [_RULE, dataset_key, draft_size, target_size, sorted(set(always))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cached_vocabulary(
    folder: Path,
    dataset_key: str,
    draft_size: int,
    target_size: int,
    count: Callable[[], np.ndarray],
    always: Sequence[int] = (),
) -> DraftVocabulary | None:
    """The table of a dataset, from `folder` if it was made before for exactly this.

    Args:
        folder: where tables are kept, one file a key.
        dataset_key: see `identity.dataset_key`.
        draft_size, target_size, always: see `select_vocabulary`.
        count: gives the counts (see `count_supervised`) if the table has to be made.

    Returns:
        None if the draft's vocabulary is not reduced; no file is looked at then.

    Raises:
        VocabularyError: the sizes cannot be, or a kept file is broken: delete it.
    """
    if draft_size >= target_size:
        return None
    key = vocabulary_key(dataset_key, draft_size, target_size, always)
    path = folder / f"vocabulary-{draft_size}-{key[:24]}.npy"
    if path.is_file():
        return DraftVocabulary.from_d2t(np.load(path, allow_pickle=False), target_size)
    counts = count()
    if len(counts) != target_size:
        raise ValueError(f"{len(counts)} counts for a target vocabulary of {target_size}")
    vocabulary = select_vocabulary(counts, draft_size, always)
    assert vocabulary is not None
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npy")
    np.save(part, vocabulary.d2t)
    part.replace(path)
    return vocabulary
