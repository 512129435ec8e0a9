"""`draft-jax export`: a trained draft as the folder stock SGLang serves.

The folder appears whole or not at all: everything is written to a temporary sibling, audited, reloaded and
compared bit for bit, and only then renamed into place.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draft_jax.config import DraftConfig
from train.evaluate.sts import STS_FILE, StsCalibration, calibration_of
from train.export_check import FP32_PREFIX, WEIGHTS, Check, check_export
from train.target_facts import TargetFacts

__all__ = [
    "Check",
    "ExportError",
    "ExportReport",
    "TargetFacts",
    "check_export",
    "export",
    "main",
    "verify_export",
    "with_targets_ids",
]

README = """# A DSpark draft for {target}

Exported by draft-jax. It holds the draft's own weights only; the embedding and the LM head are the target's.
Serve it with stock SGLang:

```
python -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm DSPARK \\
    --speculative-draft-model-path {folder} \\
    --speculative-dspark-block-size {block} --speculative-num-draft-tokens {window}
```

{block} tokens are proposed a round; the verify window of {window} has room for the target's own token too.
The draft reads the target's states after layers {taps} (0-based, of {layers}). Mask token id {mask}.

{confidence}

The accept length a server reports (`spec_accept_length`) counts the target's own token, as here.
"""
CONFIDENCE = """The confidence head is stored in fp32, the precision it is served in; it is used only with
`SGLANG_RAGGED_VERIFY_MODE=cap-accept` or `compact`."""
CALIBRATED = """
Its confidences are calibrated by `{file}`: give SGLang `--speculative-dspark-confidence-sts-path {folder}/{file}`."""
NO_CONFIDENCE = """No confidence head was trained: do not serve this draft with `SGLANG_RAGGED_VERIFY_MODE`
set to `cap-accept` or `compact`; the switch in config.json does not protect you there."""


class ExportError(RuntimeError):
    """The export was not done; the output path is as it was."""


@dataclass(frozen=True)
class ExportReport:
    """A finished export: where it is, its checklist, its size in bytes."""

    path: Path
    checks: list[Check]
    size: int


def export(
    params: Mapping[str, Any],
    config: DraftConfig,
    output: str | Path,
    *,
    target_info: Any = None,
    force: bool = False,
    calibration: StsCalibration | None = None,
) -> ExportReport:
    """Writes config.json, model.safetensors and README.md, audits and reloads them, then renames into place.

    Backbone and Markov head are rounded to bf16 (to nearest even); the confidence head stays fp32, which is
    what its serving module computes in and costs a few kilobytes.

    Args:
        params: trained parameters (fp32 master weights).
        config: what they were trained with.
        output: folder to create. An empty one is filled.
        target_info: `TargetInfo` or `TargetFacts` of the target, to compare with; None skips those checks.
        force: replace a non-empty `output`.
        calibration: temperatures of the confidence head, written as sts.json beside the weights.

    Raises:
        ExportError: the output exists, a check fails, the disk is full, or the reloaded bits differ.
    """
    from draft_jax import weights

    output = Path(output).absolute()
    _refuse_occupied(output, force)
    tensors = _serving_tensors(params, config)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _make_parent(output.parent)
    _refuse_full_disk(output.parent, size)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    partial.chmod(0o755)  # mkdtemp is private; a served folder is not
    try:
        if calibration is not None:
            calibration.write(partial / STS_FILE)
        _write(partial, tensors, config, output, calibrated=calibration is not None)
        checks = check_export(partial, target_info)
        if failed := [check for check in checks if not check.ok]:
            lines = "\n".join(str(check) for check in failed)
            raise ExportError(f"the export fails {len(failed)} check(s), nothing was written to {output}:\n{lines}")
        loaded_config, loaded, _ = weights.load_folder(partial)
        checks.append(_compare(config, loaded_config, tensors, loaded))
        _install(partial, output)
    except OSError as error:
        raise _in_words(error, output, size) from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":  # Rust's I/O errors carry their errno in the text only
            raise _in_words(error, output, size) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportReport(output, checks, size)


def with_targets_ids(config: DraftConfig, target: TargetFacts) -> DraftConfig:
    """Fills in what the checklist takes from the target and the draft's config does not say.

    DeepSpec writes neither special ids nor the target's name. Values that are there stay as they are.
    """
    known: dict[str, Any] = {
        "bos_token_id": target.config.get("bos_token_id"),
        "eos_token_id": target.config.get("eos_token_id"),
        "pad_token_id": target.config.get("pad_token_id"),
        "target_name": target.name,
    }
    return replace(config, **{name: value for name, value in known.items() if getattr(config, name) is None})


def verify_export(folder: str | Path, target_info: Any = None) -> list[Check]:
    """The checklist on an existing folder, plus one check that our own reader loads it completely."""
    from draft_jax import weights

    checks = check_export(folder, target_info)
    if all(check.ok for check in checks):
        try:
            weights.load_folder(folder)
            checks.append(Check("loads", "ok", "read back into parameters"))
        except (OSError, ValueError) as error:
            checks.append(Check("loads", "FAIL", str(error)))
    return checks


def _serving_tensors(params: Mapping[str, Any], config: DraftConfig) -> dict[str, np.ndarray]:
    """Name -> contiguous array in torch layout, in the dtypes of the file."""
    import ml_dtypes

    from draft_jax import weights

    tensors = weights.to_torch_layout(params, config, dtype=ml_dtypes.bfloat16)
    if config.enable_confidence_head:
        exact = weights.to_torch_layout(params, config, dtype=np.float32)
        tensors |= {name: tensor for name, tensor in exact.items() if name.startswith(FP32_PREFIX)}
    return {name: np.ascontiguousarray(tensor) for name, tensor in sorted(tensors.items())}


def _write(
    folder: Path, tensors: Mapping[str, np.ndarray], config: DraftConfig, output: Path, *, calibrated: bool
) -> None:
    import safetensors.numpy

    confidence = CONFIDENCE if config.enable_confidence_head else NO_CONFIDENCE
    if calibrated:
        confidence += CALIBRATED.format(folder=output.name, file=STS_FILE)

    safetensors.numpy.save_file(dict(tensors), str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    (folder / "README.md").write_text(
        README.format(
            target=config.target_name or "TARGET",
            folder=output.name,
            block=config.block_size,
            window=config.block_size + 1,
            taps=", ".join(map(str, config.target_layer_ids)),
            layers=config.num_target_layers,
            mask=config.mask_token_id,
            confidence=confidence,
        )
    )
    for path in (*folder.iterdir(), folder):  # on the disk before the rename makes them visible
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _compare(
    config: DraftConfig,
    loaded_config: DraftConfig,
    tensors: Mapping[str, np.ndarray],
    loaded: Mapping[str, Any],
) -> Check:
    """The reloaded parameters against the tensors that were to be written, every bit.

    Raises:
        ExportError: naming what differs.
    """
    from draft_jax import weights

    if loaded_config != config:
        differing = [
            f"{name} {getattr(config, name)!r} came back as {getattr(loaded_config, name)!r}"
            for name in config.__dataclass_fields__
            if getattr(config, name) != getattr(loaded_config, name)
        ]
        raise ExportError(f"config.json does not read back: {'; '.join(differing)}")
    again = weights.to_torch_layout(loaded, config, dtype=np.float32)
    for name, tensor in tensors.items():
        written, read = tensor.astype(np.float32), np.asarray(again[name])
        if written.shape != read.shape or not np.array_equal(written.view(np.uint32), read.view(np.uint32)):
            raise ExportError(f"tensor {name} does not read back bit for bit")
    return Check("reload", "ok", f"{len(tensors)} tensors equal bit for bit")


def _install(partial: Path, output: Path) -> None:
    """Renames the finished folder into place; a replaced one is kept until its successor stands."""
    if output.is_dir() and any(output.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.replaced-", dir=output.parent))
        os.replace(output, old / output.name)
        try:
            os.replace(partial, output)
        except OSError:
            os.replace(old / output.name, output)
            raise
        finally:
            if not (old / output.name).exists() or output.exists():
                shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(partial, output)  # an empty directory may be replaced


def _refuse_occupied(output: Path, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ExportError(f"{output} is a file; give a folder to create")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise ExportError(f"{output} is not empty; give another folder, or --force to replace it")


def _make_parent(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot create {parent}: {error.strerror}") from error


def _refuse_full_disk(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size * 1.01 + 2**16:
        raise ExportError(
            f"no space left for the export: it needs {size / 2**20:.1f} MiB, {folder} has {free / 2**20:.1f} MiB free"
        )


def _in_words(error: Exception, output: Path, size: int) -> ExportError:
    code = getattr(error, "errno", None)
    if code == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error):
        return ExportError(
            f"the disk of {output.parent} is full: the export needs {size / 2**20:.1f} MiB. {output} is as it was"
        )
    return ExportError(f"writing the export failed, {output} is as it was: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax export`.

    Returns:
        Exit code: 0 done, 1 when an existing export that was checked fails.

    Raises:
        ExportError, ValueError: nothing was exported; the message says why.
    """
    parser = argparse.ArgumentParser(prog="draft-jax export", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="RUN_DIR", help="a run's folder (its checkpoint is exported)")
    source.add_argument("--draft", metavar="FOLDER", help="any DSpark folder, to rewrite in the serving layout")
    source.add_argument("--check", metavar="FOLDER", help="only check an existing export")
    parser.add_argument("--output", metavar="DIR", help="folder to create (default: RUN_DIR/export)")
    parser.add_argument("--step", default="latest", help="latest, best or a step number (with --run)")
    parser.add_argument("--target", help="the target's folder, to compare with (default: the one the run names)")
    parser.add_argument("--force", action="store_true", help="replace a non-empty output folder")
    args = parser.parse_args(argv)
    if args.draft and not args.output:
        parser.error("--draft needs --output")
    if args.check:
        checks = verify_export(args.check, TargetFacts.from_folder(args.target) if args.target else None)
        print("\n".join(map(str, checks)))
        return 0 if all(check.ok for check in checks) else 1
    return _export_command(args)


def _export_command(args: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # rounding and writing need no accelerator
    from train.evaluate.draft import load_draft
    from train.evaluate.identity import draft_digest

    draft = load_draft(args.run or args.draft, args.step)
    target = args.target or draft.target
    facts = TargetFacts.from_folder(target) if target and (args.target or Path(target).is_dir()) else None
    output = args.output or Path(args.run) / "export"
    config = draft.config if facts is None else with_targets_ids(draft.config, facts)
    calibration, said = calibration_of(
        Path(args.run or args.draft), draft_digest(draft.config, draft.params), config.block_size
    )
    report = export(draft.params, config, output, target_info=facts, force=args.force, calibration=calibration)
    print("\n".join(map(str, report.checks)))
    if said:
        print(said)
    print(f"exported {draft.origin} to {report.path} ({report.size / 2**20:.1f} MiB)")
    return 0
