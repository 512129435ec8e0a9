"""Rotary frequencies and their scaling rules (the rotation itself is in `layers`). NumPy only, fp32
results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ROPE_TYPES = ("default", "linear", "llama3")
# Multi-dimensional rotary sections of vision-language targets. A draft sees text only, where all three
# coordinates are equal and the sections have no effect, so the keys are dropped (field_survey 3.7).
_TEXT_ONLY_KEYS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies deviate from `theta ** (-2 i / C)`.

    Attributes:
        rope_type: "linear" (all frequencies divided by `factor`) or "llama3" (only the slow ones, with a ramp
            between the two wavelength limits).
        factor: stretch of the context.
        low_freq_factor: llama3 only; wavelengths above `original / low_freq_factor` are divided by `factor`.
        high_freq_factor: llama3 only; wavelengths below `original / high_freq_factor` are left alone.
        original_max_position_embeddings: llama3 only; the context length before stretching.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES[1:]:
            raise ValueError(
                f"rope_scaling type {self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling factor must be >= 1, got {self.factor!r}")
        if self.rope_type == "llama3":
            low, high, _ = self._llama3()
            if not high > low:
                raise ValueError(f"rope_scaling high_freq_factor {high} must exceed low_freq_factor {low}")

    def _llama3(self) -> tuple[float, float, int]:
        """`(low, high, original)`, all given."""
        given = {}
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            given[name] = getattr(self, name)
            if given[name] is None:
                raise ValueError(f"rope_scaling of type 'llama3' lacks {name}")
        low, high, original = given.values()
        return low, high, original

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Scaled frequencies, radians per position."""
        stretched = frequencies / self.factor
        if self.rope_type == "linear":
            return stretched
        # Short wavelengths stay, long ones are stretched, and between the limits the two are blended linearly
        # in the number of turns over the original context.
        low, high, original = self._llama3()
        turns = original * frequencies / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * frequencies + (1 - keep) * stretched

    @classmethod
    def from_hf(cls, scaling: Mapping[str, Any] | None) -> RopeScaling | None:
        """Reads HF's `rope_scaling` (or the scaling part of `rope_parameters`); `None` when nothing is
        scaled.

        Raises:
            ValueError: an unsupported type or an unknown key, by name.
        """
        if not scaling:
            return None
        entries = {key: value for key, value in scaling.items() if key not in _TEXT_ONLY_KEYS}
        old_name, new_name = entries.pop("type", None), entries.pop("rope_type", None)
        rope_type = new_name or old_name or "default"
        entries.pop("rope_theta", None)
        if entries.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
            raise ValueError(
                f"rope_scaling partial_rotary_factor {scaling['partial_rotary_factor']} is not supported: "
                "the draft rotates whole heads"
            )
        if rope_type in ("default", "mrope"):
            return None
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_scaling type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}. "
                "Override rope_scaling to choose one for the draft"
            )
        known = {"factor"}
        if rope_type == "llama3":
            known |= {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        unknown = set(entries) - known
        if unknown:
            raise ValueError(f"rope_scaling of type {rope_type!r} has unknown key(s) {', '.join(sorted(unknown))}")
        if "factor" not in entries:
            raise ValueError(f"rope_scaling of type {rope_type!r} lacks factor")
        return cls(rope_type=rope_type, **entries)

    def to_hf(self) -> dict[str, Any]:
        """The dict HF configs hold, without `rope_theta`."""
        entries: dict[str, Any] = {"rope_type": self.rope_type, "factor": self.factor}
        if self.rope_type == "llama3":
            entries |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_position_embeddings,
            }
        return entries


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Rotary frequencies in radians per position.

    Computed in fp64 and rounded once to fp32. They are never rounded to the compute dtype: bf16 frequencies
    put a phase error of about one radian on position 1000 (dspark_spec 8.2).

    Returns:
        fp32 array `[head_dim / 2]`.
    """
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        frequencies = scaling.scale(frequencies)
    return frequencies.astype(np.float32)
