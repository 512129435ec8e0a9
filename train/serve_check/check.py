"""One check: serve with the draft, then without, one server at a time, and compare."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_jax.config import DraftConfig
from target_bridge.serving.known_faults import known_fault
from target_bridge.serving.server import EngineServer, ServerFailure, ServerSettings
from train.evaluate.config import GREEDY_BELOW
from train.serve_check.accounting import AccountingError
from train.serve_check.comparison import Comparison, Identity, compare_outputs, with_margins
from train.serve_check.config import ServeConfig
from train.serve_check.offline import DTYPE, Asked, OfflineResult
from train.serve_check.serving import ServedPass, margins, serve_pass

#: Tokens kept free at the end of the context beside the verify window, which SGLang writes ahead.
SLACK = 2


@dataclass(frozen=True)
class Check:
    """What is checked.

    Attributes:
        name: the draft in words.
        draft: its configuration.
        digest: of its content (train.evaluate.identity).
        folder: its served folder.
        target: name or folder of the target.
        output: folder of everything written.
    """

    name: str
    draft: DraftConfig
    digest: str
    folder: Path
    target: str
    output: Path


def run(
    config: ServeConfig, check: Check, asked: Asked, offline: Mapping[float, OfflineResult], *, trust: bool = False
) -> tuple[list[Comparison], dict[str, Any]]:
    """Serves with the draft, then without, one server at a time, and compares.

    Returns:
        A comparison per temperature, and facts of the servers.

        A failure of the second server is told in the facts ("without it": "failure"), and its columns are empty.

    Raises:
        ServerFailure, AccountingError: serving with the draft failed, or cannot be counted.
    """
    first = next(iter(offline.values()))
    eos = [int(token) for token in first.settings["eos_token_ids"]]
    context = asked.longest + check.draft.block_size + 1 + SLACK
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if Path(check.target).is_dir() else {}
    facts: dict[str, Any] = {}

    def serve(name: str, draft: str | None) -> EngineServer:
        print(f"starting SGLang {name}", file=sys.stderr)
        engine = config.engine(
            check.target, DTYPE, context, draft=draft, block_size=check.draft.block_size, trust=trust
        )
        log = check.output / f"server_{name.replace(' ', '_')}.log"
        return EngineServer(
            ServerSettings(engine, log, config.python, config.pythonpath, environment, config.deadlines)
        )

    def all_passes(server: EngineServer, name: str, block_size: int | None) -> dict[float, ServedPass]:
        facts.setdefault("version", server.version)
        facts[name] = {**server.facts, "start_seconds": round(server.start_seconds, 2)}
        if block_size is not None and (fault := known_fault(server.version, server.facts)):
            facts["known_fault"] = fault
            print(f"WARNING: {fault}", file=sys.stderr)
        passes = {}
        for temperature in config.temperatures:
            begin = time.monotonic()
            passes[temperature] = serve_pass(server, asked, temperature, eos, block_size, config.concurrency)
            spent = time.monotonic() - begin
            print(f"served {name} at temperature {temperature:g} ({spent:.0f} s, warm-up included)", file=sys.stderr)
        return passes

    with serve("with the draft", str(check.folder)) as server:
        served = all_passes(server, "with the draft", check.draft.block_size)
    identities = {}
    greedy = next((t for t in config.temperatures if t < GREEDY_BELOW), None)
    if greedy is not None:
        identities["offline"] = compare_outputs(served[greedy].outputs, offline[greedy].outputs)
    plain: dict[float, ServedPass] = {}
    if config.plain:
        try:
            with serve("without it", None) as server:
                plain = all_passes(server, "without it", None)
                if greedy is not None:
                    identities["plain"] = compare_outputs(served[greedy].outputs, plain[greedy].outputs)
                    for kind in identities:
                        identities[kind] = _with_margins(identities[kind], server, asked, served[greedy])
        except (ServerFailure, AccountingError) as error:  # what was measured with the draft is not to be lost
            facts["without it"] = {"failure": str(error)}
    return [
        Comparison(
            t, offline[t], served[t], plain.get(t), check.draft.block_size, config.tolerance,
            identities.get("plain") if t == greedy else None,
            identities.get("offline") if t == greedy else None,
        )
        for t in config.temperatures
    ], facts  # fmt: skip


def _with_margins(identity: Identity, server: EngineServer, asked: Asked, served: ServedPass) -> Identity:
    """How clear plain decoding's choice was at each difference."""
    ids = {prompt.id: prompt.input_ids.tolist() for prompt in asked.prompts}
    places = {item.prompt: served.outputs[item.prompt][: item.position] for item in identity.differences}
    return with_margins(identity, margins(server, ids, places))
