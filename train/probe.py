"""`draft-jax probe`: does the target hand out what a draft is trained on? Also asked before a run (`require`)."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ConfigError, RunConfig

if TYPE_CHECKING:
    from target_bridge.probe import ProbeReport
    from target_bridge.sglang_hooks import Serving

#: Bytes a copy of the target for comparison may take before a run; a probe by hand may take half of what is free.
BRIEF = 4 * 2**30


class ProbeError(RuntimeError):
    """The target failed the probe: a run with it would be wasted."""


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax probe`."""
    made = argparse.ArgumentParser(
        prog="draft-jax probe",
        usage="draft-jax probe (--config FILE | --target FOLDER) [options] [--target.KEY=VALUE ...]",
        description="Checks that a target's captured states, head and logits are what a draft relies on.",
        epilog="Any key of a configuration can be set as in draft-jax train, e.g. --target.sglang.page_size=16.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--config", help="a run's configuration; the target and the taps it would use are probed")
    add("--target", help="folder or hub name of the target, instead of a configuration")
    add("--bridge", choices=("hf", "sglang"), help="which runs it (default: hf, or as the configuration says)")
    add("--layer-ids", help="taps, e.g. 1,8,15 (default: the draft's, else spread evenly)")
    add("--draft", help="folder of a draft whose taps are probed")
    add("--dtype", choices=("auto", "float32", "bfloat16"), help="of the target")
    add("--device", help="auto, cpu, cuda or cuda:N")
    add("--no-compare", action="store_true", help="do not load the target a second time with Transformers")
    add("--compare-gib", type=float, help="memory that copy may take (default: half of what is free)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax probe`.

    Returns:
        0 when everything passed, else 1.

    Raises:
        ConfigError: the options make no target.
        ValueError, RuntimeError: the target could not be loaded.
    """
    args, rest = parser().parse_known_args(argv)
    config = _config(args, rest)
    if config.target.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from . import runtime
    from .resolve import read_target_config, resolve_dtype

    platform, _ = runtime.start_jax(config)
    target_config = read_target_config(config.target)
    layer_ids = _layer_ids(config, target_config, args.draft)
    target = runtime.load_target(config, layer_ids, platform, resolve_dtype(config.target.dtype, platform))
    if args.no_compare:
        budget = 0
    elif args.compare_gib is not None:
        budget = int(args.compare_gib * 2**30)
    else:
        from target_bridge.probe_reference import available_memory

        budget = available_memory() // 2
    report = run_probe(target, config, target_config, budget=budget)
    print(format_report(report, config.target.bridge))
    return 0 if report.ok else 1


def require(target: Any, config: RunConfig, target_config: dict[str, Any]) -> None:
    """Probe a target before a run with it, in seconds, and print the verdicts.

    Raises:
        ProbeError: something failed.
    """
    report = run_probe(target, config, target_config, budget=BRIEF)
    print(format_report(report, config.target.bridge), flush=True)
    if not report.ok:
        raise ProbeError(
            f"target {config.target.path} failed the probe ({'; '.join(map(str, report.failures))}). A draft trained"
            " on it would not be accepted; target.probe: false starts the run all the same"
        )


def run_probe(target: Any, config: RunConfig, target_config: dict[str, Any], *, budget: int) -> ProbeReport:
    """Probe a loaded target.

    Args:
        target: Of either bridge.
        config: Its `target` section is read.
        target_config: The target's config.json.
        budget: Bytes for a second copy of it with Transformers; 0 = no copy. With `bridge: hf` none is needed.
    """
    from target_bridge.probe import probe, probe_documents
    from target_bridge.probe_reference import load_reference
    from target_bridge.target import TargetError

    documents = probe_documents(target)
    references, missing = [], []
    try:
        if (own := target.layer_states(documents)) is not None:
            references.append(own)
    except TargetError as error:
        missing.append(str(error))
    settings = config.target
    if settings.bridge == "hf":
        pass  # its own layers are Transformers'
    elif budget == 0:
        missing.append("a comparison with Transformers was not asked for")
    else:
        try:
            references.append(
                load_reference(
                    settings.path,
                    documents,
                    target.info,
                    budget=budget,
                    revision=settings.revision,
                    trust_remote_code=settings.trust_remote_code,
                )
            )
        except TargetError as error:
            missing.append(str(error))
    serving = _serving(target, target_config)
    return probe(target, documents, references, not_compared="; ".join(missing), serving=serving)


def format_report(report: ProbeReport, bridge: str) -> str:
    """A table of the streams, then the verdicts."""
    from .report import terminal_table

    sources = list(report.streams[0].references)
    rows: list[tuple[Any, ...]] = [
        ("stream", "finite", "rms", "spread", "nearest other", "apart", *(f"against {source}" for source in sources))
    ]
    for stream in report.streams:
        nearest, apart = stream.nearest_stream or ("-", None)
        compared = [found and f"{found.difference:.2g}" for found in (stream.references[source] for source in sources)]
        rows.append((stream.name, f"{stream.finite:.2%}", stream.rms, stream.spread, nearest, apart, *compared))
    info = report.info
    lines = [
        f"Probe of target {info.name} over bridge {bridge} in {info.dtype}: documents of"
        f" {', '.join(map(str, report.tokens))} tokens",
        "",
        terminal_table(rows),
        "",
        *map(str, report.checks),
        "",
        "PROBE PASS" if report.ok else f"PROBE FAIL: {len(report.failures)} of {len(report.checks)} points",
    ]
    return "\n".join(lines)


def _config(args: argparse.Namespace, rest: Sequence[str]) -> RunConfig:
    from .cli import parse_train
    from .config_file import load_config

    path, overrides, _ = parse_train(rest)
    if (args.config is None) == (args.target is None) or path is not None:
        raise ConfigError("draft-jax probe takes either --config FILE or --target FOLDER")
    given = {"bridge": args.bridge, "dtype": args.dtype, "device": args.device}
    if args.target is not None:
        given |= {"path": json.dumps(args.target)}
        # A target is probed without data or a run; the configuration wants a name for either.
        overrides = [("data.path", "none"), ("run_dir", "none"), *overrides]
    overrides = [*overrides, *((f"target.{key}", value) for key, value in given.items() if value is not None)]
    if args.layer_ids is not None:
        overrides.append(("draft.target_layer_ids", f"[{args.layer_ids.strip('[]')}]"))
    return load_config(args.config, overrides)


def _layer_ids(config: RunConfig, target_config: dict[str, Any], draft: str | None) -> tuple[int, ...]:
    """The taps: as given, of the draft's folder, or spread evenly as a new draft's would be."""
    from draft_jax.config import DraftConfig, spread_layer_ids

    if config.draft.target_layer_ids is not None:
        return config.draft.target_layer_ids
    folder = draft or config.draft.init_draft
    if folder is not None:
        try:
            return DraftConfig.from_hf(json.loads((Path(folder) / "config.json").read_text())).target_layer_ids
        except OSError as error:
            raise ConfigError(f"{folder} is not a draft's folder: {error.strerror}, config.json") from error
    depth = int((target_config.get("text_config") or target_config)["num_hidden_layers"])
    return spread_layer_ids(depth, config.draft.num_taps or min(5, max(1, depth - 3)))


def _serving(target: Any, target_config: dict[str, Any]) -> Serving:
    """What SGLang offers: the loaded engine's class, else the table of the installed or the newest supported one."""
    from target_bridge.sglang_hooks import VERSIONS, table_serving

    if hasattr(target, "serving"):
        return target.serving
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = ""
    name = str((target_config.get("architectures") or ["unknown class"])[0])
    return table_serving(name, installed if installed in VERSIONS else VERSIONS[-1])
