"""Is what a target hands out what the draft believes it is? Measured on a few documents, before a run.

A tap that is one layer off, a head whose rows are permuted, two taps that are the same stream: each trains without
an error, towards a draft that is never accepted. So the states are measured, held against Transformers and against
the target's own layers and logits, and every point is given a verdict with its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from target_bridge.probe_reference import LayerStates
from target_bridge.probe_streams import FINAL, Stream, measure, split_streams
from target_bridge.sglang_hooks import Serving
from target_bridge.target import Capture, Target, TargetInfo

#: Largest relative difference from a reference. In bfloat16 the tiny models of the tests differ by 0.01 to 0.02, deep
#: ones by a few times that; neighbouring layers differ by 0.1 and more, and the nearest one must be the right one too.
STATE_TOLERANCE = {"float32": 2e-3, "bfloat16": 8e-2}
#: So many times that in one document: a mixture of experts may route one of a few tokens otherwise.
ONE_DOCUMENT = 5
#: Largest difference of logits, relative to the largest logit.
LOGIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
#: Two streams nearer than this are the same stream.
DISTINCT = 1e-3
#: Root mean square of a token's state: outside, something was not added up, or was added up too often.
PLAUSIBLE = (1e-4, 1e5)
#: Largest ratio of that between two taps.
GROWTH = 1e3

Status = Literal["PASS", "FAIL", "NOTE"]

_TEXTS = (
    "Rivers carry what the rain takes from the hills. A harbour town of nine thousand people lives from that: from "
    "clay, from eels, and from the ferry that has crossed at seven every morning since 1884. Ask anyone there why.",
    "def mean(values):\n    if not values:\n        return 0\n    return sum(values) / len(values)",
    "Three plus four times two is",
    "Yes",
)


class ProbedTarget(Target, Protocol):
    """A target that can also say what it computes itself."""

    def own_logits(self, documents: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """[V] per document: the logits after its last token, by the target's own head, not by `frozen_head`."""
        ...

    def layer_states(self, documents: Sequence[np.ndarray]) -> LayerStates | None:
        """What its layers put out, read apart from `capture`; None where that cannot be told."""
        ...


@dataclass(frozen=True)
class Check:
    """One point: its name, the verdict, and the numbers behind it. A NOTE is no verdict: it was not judged."""

    name: str
    status: Status
    detail: str

    def __str__(self) -> str:
        return f"{self.status}  {self.name}: {self.detail}"


@dataclass(frozen=True)
class ProbeReport:
    """Everything a probe found.

    Attributes:
        info: Of the target.
        tokens: Lengths of the documents.
        streams: The taps in order, then the final state.
        checks: The verdicts.
    """

    info: TargetInfo
    tokens: tuple[int, ...]
    streams: tuple[Stream, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.status != "FAIL" for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == "FAIL"]


def probe_documents(target: Target, longest: int = 64) -> list[np.ndarray]:
    """Ragged documents to probe with: text where the target has a tokenizer, random ids otherwise.

    Args:
        target: Its tokenizer and limits.
        longest: Most tokens of one document.
    """
    info = target.info
    limit = min(longest, info.max_length)
    try:
        encoded = [target.tokenizer(text, add_special_tokens=True)["input_ids"] for text in _TEXTS]
        found = [np.asarray(ids[:limit], np.int64) for ids in encoded if len(ids)]
    except ValueError:  # a folder without a tokenizer says so with TargetError
        found = []
    if not found or max(int(ids.max()) for ids in found) >= info.vocab_size:
        random = np.random.default_rng(0)
        found = [random.integers(0, info.vocab_size, min(count, limit)) for count in (5, 64, 17, 1)]
    return found


def probe(
    target: ProbedTarget,
    documents: Sequence[np.ndarray],
    references: Sequence[LayerStates] = (),
    *,
    not_compared: str = "",
    serving: Serving | None = None,
) -> ProbeReport:
    """Measure a target and judge it.

    Args:
        target: With its taps.
        documents: 1-D token ids, of different lengths.
        references: Layer outputs of the same documents from elsewhere, each compared with every tap it has.
        not_compared: Why a reference is missing, for the report.
        serving: What SGLang offers for this class; None leaves the serving lines out.
    """
    info = target.info
    capture = target.capture(documents)
    streams = split_streams(capture, info)
    measured = tuple(measure(name, streams, references) for name in streams)
    checks = [
        _finite(measured),
        _scale(measured),
        _distinct(measured),
        *_against(measured, references, info, not_compared),
        _together(target, documents, capture),
        _head(target, documents),
    ]
    if serving is not None:
        checks += serving_checks(serving)
    return ProbeReport(info, tuple(len(ids) for ids in documents), measured, tuple(checks))


def serving_checks(serving: Serving) -> list[Check]:
    """The hook the class has, and what stock SGLang can serve with it. DSpark is what is trained here: it must."""
    has = ", ".join(sorted(serving.hooks)) or "none"
    asked = "its loaded class" if serving.loaded else "the table of supported classes"
    known: Status = "PASS" if serving.hook("DSPARK") else "FAIL"
    return [
        Check("capture hook", known, f"{serving.architecture} in SGLang {serving.version}: {has} ({asked})"),
        Check("SGLang serves DSpark", known, serving.explain("DSPARK")),
        *(
            Check(f"SGLang serves {name}", "PASS" if serving.hook(key) else "NOTE", serving.explain(key))
            for name, key in (("DFlash", "DFLASH"), ("EAGLE-3", "EAGLE3"))
        ),
    ]


def _finite(streams: Sequence[Stream]) -> Check:
    worst = min(streams, key=lambda stream: stream.finite)
    ok = worst.finite == 1.0
    detail = "all states" if ok else f"{worst.name} has {worst.finite:.2%} finite numbers; the draft would learn NaN"
    return Check("finite", "PASS" if ok else "FAIL", detail)


def _scale(streams: Sequence[Stream]) -> Check:
    reasons = [
        f"{stream.name} has a root mean square of {stream.rms:.3g}, outside {PLAUSIBLE[0]:g}..{PLAUSIBLE[1]:g}"
        for stream in streams
        if not PLAUSIBLE[0] <= stream.rms <= PLAUSIBLE[1]
    ]
    reasons += [
        f"{stream.name} hardly depends on the token (spread {stream.spread:.2g})"
        for stream in streams
        if not stream.spread > DISTINCT
    ]
    taps = [stream.rms for stream in streams if stream.name != FINAL]
    ratio = max(taps) / max(min(taps), 1e-30)
    if not ratio <= GROWTH:
        reasons.append(f"the largest tap is {ratio:.3g} times the smallest, above {GROWTH:g}")
    detail = "; ".join(reasons) or f"root mean squares {min(taps):.3g} to {max(taps):.3g}"
    return Check("scale", "FAIL" if reasons else "PASS", detail)


def _distinct(streams: Sequence[Stream]) -> Check:
    pairs = [(stream.name, *stream.nearest_stream) for stream in streams if stream.nearest_stream]
    name, other, apart = min(pairs, key=lambda pair: pair[2] if pair[2] == pair[2] else -1.0)
    ok = apart >= DISTINCT
    detail = f"nearest are {name} and {other}, {apart:.3g} apart"
    if not ok:
        detail += ": that is the same stream twice" if apart < DISTINCT else ", which cannot be judged"
    return Check("streams differ from one another", "PASS" if ok else "FAIL", detail)


def _against(
    streams: Sequence[Stream], references: Sequence[LayerStates], info: TargetInfo, not_compared: str
) -> list[Check]:
    checks = [_against_one(streams, reference.source, info) for reference in references]
    if not_compared or not references:
        checks.append(Check("not compared", "NOTE", not_compared or "there is nothing to compare the taps with"))
    return checks


def _against_one(streams: Sequence[Stream], source: str, info: TargetInfo) -> Check:
    tolerance = STATE_TOLERANCE[info.dtype]
    compared = [(stream, found) for stream in streams if (found := stream.references[source]) is not None]
    name = f"equal to {source}"
    if not compared:
        return Check(name, "NOTE", "none of the tapped layers is among them")
    reasons = []
    for stream, found in compared:
        if found.best is not None and found.best != stream.layer:
            shift = found.best - (stream.layer or 0)
            reasons.append(
                f"{stream.name} is off by {found.difference:.3g}: it fits layer {found.best}, shifted by {shift:+d}"
            )
        elif not found.difference <= tolerance:
            reasons.append(f"{stream.name} is off by {found.difference:.3g}, more than {tolerance:g}")
        elif not found.worst <= ONE_DOCUMENT * tolerance:
            reasons.append(
                f"{stream.name} is off by {found.worst:.3g} in one document, more than {ONE_DOCUMENT * tolerance:g}"
            )
    largest = max(found.difference for _, found in compared)
    detail = "; ".join(reasons) or (
        f"{len(compared)} of {len(streams)} streams, largest relative difference {largest:.2g} of {tolerance:g}"
    )
    return Check(name, "FAIL" if reasons else "PASS", detail)


def _together(target: ProbedTarget, documents: Sequence[np.ndarray], capture: Capture) -> Check:
    """A document's states must not depend on which others are captured with it, nor be another one's."""
    worst, where = 0.0, 0
    for number, ids in enumerate(documents):
        alone = target.capture([ids])
        for states, beside in (
            (alone.context_hidden, capture.context_hidden),
            (alone.last_hidden, capture.last_hidden),
        ):
            expected = states[0].float()
            gap = float((beside[number].float() - expected).norm() / expected.norm().clamp_min(1e-30))
            if not gap <= worst:
                worst, where = gap, number
    tolerance = ONE_DOCUMENT * STATE_TOLERANCE[target.info.dtype]
    detail = f"largest relative difference {worst:.2g} (allowed {tolerance:g}), in document {where}"
    return Check("the same alone and beside others", "PASS" if worst <= tolerance else "FAIL", detail)


def _head(target: ProbedTarget, documents: Sequence[np.ndarray]) -> Check:
    """The frozen head on the final state must give the target's own logits: nothing else is trained towards.

    Each document is captured alone, as its logits are: beside others its states round otherwise in bfloat16, by more
    than the head may.
    """
    info = target.info
    _, head = target.frozen_head()
    worst, agree = 0.0, 0
    for ids in documents:
        (last,), (own,) = target.capture([ids]).last_hidden, target.own_logits([ids])
        theirs = own[: info.vocab_size].float()
        ours = F.linear(last[-1].to(head), head)[: info.vocab_size].float().to(theirs)
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
        worst = max(worst, error) if error == error else error
        agree += int(ours.argmax() == theirs.argmax())
        if worst != worst:
            break
    tolerance = LOGIT_TOLERANCE[info.dtype]
    ok = worst <= tolerance
    detail = (
        f"largest difference {worst:.2g} of the largest logit (allowed {tolerance:g}), same best token in {agree} of "
    )
    return Check("LM head on the final state gives the logits", "PASS" if ok else "FAIL", detail + f"{len(documents)}")
