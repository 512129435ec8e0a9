"""Records -> judged samples, in two halves: what a worker can do alone, and what needs all that came before."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import DataConfig
from .files import Place
from .row_reader import RowReader, account_for
from .samples import Judged, Sample, make_sample
from .seen import SeenHashes
from .sources import Record
from .summary import Summary


@dataclass(frozen=True)
class PlacedSample:
    """A judged sample of a chunk.

    Attributes:
        judged: the sample.
        place: where its row stands, as text.
        length: tokens before it was cut.
        content: 64-bit hash of its ids and mask as they are trained on.
    """

    judged: Judged
    place: str
    length: int
    content: int


@dataclass(frozen=True)
class Chunk:
    """What a worker made of some records.

    Attributes:
        samples: in the order of the records.
        summary: counts of rows, refusals and notes; samples are counted by who keeps them.
        texts, ids: rows compared with the tokenizer's own template, by text and by ids.
        rendered: whether a chat template was used.
    """

    samples: list[PlacedSample]
    summary: Summary
    texts: int = 0
    ids: int = 0
    rendered: bool = False


class ChunkReader:
    """Reads chunks of records; holds nothing of one for the next. Made once in every worker."""

    def __init__(self, config: DataConfig, tokenizer: Any, vocab_size: int):
        """See `RowReader`."""
        self._config = config
        self._reader = RowReader(config, tokenizer, vocab_size)

    def read(self, records: Sequence[tuple[Place, Record]]) -> Chunk:
        """Raises DataError and TemplateError as `RowReader.read`."""
        summary, samples = Summary(), []
        texts, ids = self._reader.compared
        for row in self._reader.read(records):
            account_for(row, summary)
            for encoded in row.rows:
                judged = make_sample(
                    row.row_id(encoded),
                    encoded.input_ids,
                    encoded.loss_mask,
                    max_length=self._config.max_length,
                    min_loss_tokens=self._config.min_loss_tokens,
                )
                content = content_hash(judged.sample)
                samples.append(PlacedSample(judged, str(row.place), len(encoded.input_ids), content))
        texts_now, ids_now = self._reader.compared
        return Chunk(samples, summary, texts_now - texts, ids_now - ids, self._reader.rendered)

    def describe_template(self, texts: int, ids: int) -> str:
        """See `RowReader.describe_template`."""
        return self._reader.describe_template(texts, ids)


class Collector:
    """Takes chunks in order: drops duplicates, makes ids unique, counts.

    Attributes:
        summary: of all chunks so far, `template` aside.
        texts, ids, rendered: sums of the chunks' own.
    """

    def __init__(self, config: DataConfig, summary: Summary):
        """Args: config: what to read and how; summary: filled."""
        self.summary = summary
        self.texts = 0
        self.ids = 0
        self.rendered = False
        self._drop = summary.duplicates_dropped = config.duplicates == "drop"
        self._contents = SeenHashes()
        self._names = SeenHashes()

    def remember(self, contents: np.ndarray, names: Sequence[str]) -> None:
        """Takes over samples that an earlier run kept: their hashes (uint64) and the ids their rows gave them."""
        self._contents.add(contents)
        self._names.add(_name_hashes(names))

    def add(self, chunk: Chunk) -> Iterator[PlacedSample]:
        """The samples of a chunk that are kept, under ids of their own: one seen before gets its place added."""
        summary = self.summary
        summary.merge(chunk.summary)
        self.texts += chunk.texts
        self.ids += chunk.ids
        self.rendered |= chunk.rendered
        new = self._contents.add(np.array([item.content for item in chunk.samples], np.uint64))
        kept = []
        for item, fresh in zip(chunk.samples, new):
            if not fresh:
                summary.duplicates.add(item.place)
            if fresh or not self._drop:
                kept.append(item)
        unused = self._names.add(_name_hashes([item.judged.sample.id for item in kept]))
        for item, fresh in zip(kept, unused):
            judged = item.judged
            if not fresh:
                sample = judged.sample
                summary.note("ids that occur twice, made unique", f"{item.place}, id {sample.id}")
                sample = Sample(f"{sample.id}@{item.place}", sample.input_ids, sample.loss_mask)
                judged = Judged(sample, judged.truncated, judged.zeroed)
            summary.count_sample(judged, item.place, item.length)
            yield PlacedSample(judged, item.place, item.length, item.content)


def content_hash(sample: Sample) -> int:
    """64 bits of a hash of ids and mask: equal for samples that train alike."""
    digest = hashlib.blake2b(np.ascontiguousarray(sample.input_ids, "<i4").tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(sample.loss_mask, "<i1").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _name_hashes(names: Sequence[str]) -> np.ndarray:
    digests = [hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
