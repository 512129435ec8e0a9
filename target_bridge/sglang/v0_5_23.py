"""SGLang 0.5.23: capture is native (a server flag), configuration is published before the runner is built."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from target_bridge.sglang.adapter import Packed, Start, find_hook, plain_tree, round_up, server_arguments
from target_bridge.sglang.world import tear_down, world_exists

#: Setter of the model class -> the flag's name for that convention.
_METHODS = {
    "set_dspark_layers_to_capture": "DSPARK",
    "set_dflash_layers_to_capture": "DFLASH",
    "set_eagle3_layers_to_capture": "EAGLE3",
}


def make() -> Adapter0523:
    """The adapter; nothing of sglang is imported before `start`."""
    return Adapter0523()


class Adapter0523:
    """See `target_bridge.sglang.adapter.Adapter`."""

    runner: Any = None
    _owns_world: bool = True

    def start(self, start: Start) -> str:
        """Publish the arguments, set up the process groups, load the model, allocate the pools."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_loader.utils import get_model_architecture
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import ServerArgs

        self._owns_world = not world_exists()
        # The flag wants the convention's name, which only the model's class tells; reading it costs no weights.
        common = server_arguments(start)
        probe = ServerArgs(**common)
        probe.resolve_once()
        model_class, _ = get_model_architecture(ModelConfig.from_server_args(probe))
        hook = find_hook(model_class, start.model_path)
        arguments = ServerArgs(
            **common,
            speculative_algorithm=_METHODS[hook],  # names the convention only: no draft is loaded
            enable_return_aux_hidden_states=True,
            return_aux_hidden_state_layer_ids=list(start.layer_ids),
        )
        rank = spawn_world_rank(arguments, tp_rank=start.tp_rank, pp_rank=0)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=start.gpu))
        config = ModelConfig.from_server_args(arguments)
        bootstrap.init_parallel_runtime(server_args=arguments, device=start.device.type, dist_port=start.port)
        bootstrap.init_layer_runtime(model_config=config)
        self.runner = ModelRunner(
            model_config=config,
            mem_fraction_static=start.mem_fraction_static,
            gpu_id=start.gpu,
            nccl_port=start.port,
            server_args=arguments,
        )
        self.runner.alloc_memory_pool()
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs()
        return hook

    def new_tree(self) -> Any:
        """A plain radix tree over the pools."""
        return plain_tree(self.runner)

    def begin(self, name: str, ids: Sequence[int], tree: Any, extra_key: str | None) -> Any:
        """A request with its prefix matched and locked."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req(
            rid=name,
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
            return_hidden_states=True,
            extra_key=extra_key,
        )
        request.logprob_start_len = -1
        request.init_next_round_input(tree)
        request.extend_end = len(request.full_untruncated_fill_ids)
        request.lock = tree.lock(request.last_node)
        return request

    def prefix_length(self, handle: Any) -> int:
        """Tokens of the matched prefix."""
        return int(handle.prefix_len)

    @torch.no_grad()
    def forward(self, handles: Sequence[Any], tree: Any) -> Packed:
        """One extend forward of all requests."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self.runner
        batch = ScheduleBatch.init_new(
            reqs=list(handles),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=tree,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:  # the scheduler moves them itself, on its forward stream
            batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu.to(batch.device), None
        forward = ForwardBatch.init_new(
            batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
        )
        output = runner.forward(forward).logits_output
        for handle in handles:
            handle.kv.kv_committed_len = handle.extend_end
        return Packed(
            context=output.hidden_states,
            last=output.last_hidden_states,
            logits=output.next_token_logits,
            counts=[int(handle.extend_len) for handle in handles],
        )

    def rewind(self, handle: Any, tree: Any, keep: int) -> None:
        """Free whole pages past the border; the page that holds it goes on belonging to the request."""
        free_from = round_up(keep, self.runner.page_size)
        if free_from < handle.kv.kv_allocated_len:
            tree.free_kv_row(handle.kv, [(free_from, handle.kv.kv_allocated_len)])
        handle.kv.kv_committed_len = handle.kv.kv_allocated_len = keep

    def grow(self, handle: Any, ids: np.ndarray) -> None:
        """As the next chunk of a chunked prefill: the prefix is read off the request's own row."""
        handle.origin_input_ids = handle.full_untruncated_fill_ids = array("q", ids.tobytes())
        handle.prefix_len = handle.already_computed = handle.kv.kv_committed_len
        handle.extend_end = len(ids)

    def release(self, handle: Any, tree: Any, keep: int) -> None:
        """Keep `keep` tokens in the tree, free the rest; the page that holds the border is freed once, by the cache."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if keep:
            self.rewind(handle, tree, keep)
        release_kv_cache(handle, tree, checkpoint=keep > 0)

    def unlock(self, handle: Any, tree: Any) -> None:
        """Release the lock on the prefix."""
        tree.unlock(handle.lock)
        handle.lock = None

    def stop(self) -> None:
        """Destroy SGLang's process groups and let go of weights and pools."""
        runner, self.runner = self.runner, None
        tear_down(runner, owns_world=self._owns_world)
