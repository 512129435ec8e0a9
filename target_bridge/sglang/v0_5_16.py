"""SGLang 0.5.16, the newest release for torch 2.11: taps through the model's setter, the final state through a hook."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from target_bridge.sglang.adapter import Packed, Start, find_hook, plain_tree, round_up, server_arguments
from target_bridge.sglang.world import tear_down, world_exists
from target_bridge.target import TargetError


def make() -> Adapter0516:
    """The adapter; nothing of sglang is imported before `start`."""
    return Adapter0516()


class Adapter0516:
    """See `target_bridge.sglang.adapter.Adapter`."""

    runner: Any = None
    _owns_world: bool = True
    _last: torch.Tensor | None = None

    def start(self, start: Start) -> str:
        """Publish the arguments and build the runner, which sets up the process groups itself."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_loader.utils import get_model_architecture
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        self._owns_world = not world_exists()
        arguments = ServerArgs(**server_arguments(start), enable_return_hidden_states=True)
        set_global_server_args_for_scheduler(arguments)
        config = ModelConfig.from_server_args(arguments)
        model_class, _ = get_model_architecture(config)
        hook = find_hook(model_class, start.model_path)
        self.runner = ModelRunner(
            model_config=config,
            mem_fraction_static=start.mem_fraction_static,
            gpu_id=start.gpu,
            ps=ParallelState.trivial(
                tp_rank=start.tp_rank,
                tp_size=start.tp_size,
                attn_tp_rank=start.tp_rank,
                attn_tp_size=start.tp_size,
                gpu_id=start.gpu,
            ),
            nccl_port=start.port,
            server_args=arguments,
        )
        self.runner.alloc_memory_pool()
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs()
        getattr(self.runner.model, hook)(list(start.layer_ids))
        # The output carries the taps only; the state after the final norm passes by here, in every model class.
        self.runner.model.logits_processor.register_forward_pre_hook(self._record, with_kwargs=True)
        return hook

    def _record(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._last = args[1] if len(args) > 1 else kwargs["hidden_states"]

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
        request.set_extend_range(len(request.prefix_indices), len(request.full_untruncated_fill_ids))
        tree.inc_lock_ref(request.last_node)
        return request

    def prefix_length(self, handle: Any) -> int:
        """Tokens of the matched prefix."""
        return len(handle.prefix_indices)

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
        self._last = None
        output = runner.forward(forward).logits_output
        last, self._last = self._last, None
        if last is None:
            raise TargetError(
                f"SGLang's {type(runner.model).__name__} never called its logits_processor, where the final state is"
                " read; give target.bridge: hf"
            )
        return Packed(
            context=output.hidden_states,
            last=last,
            logits=output.next_token_logits,
            counts=[int(handle.extend_range.length) for handle in handles],
        )

    def rewind(self, handle: Any, tree: Any, keep: int) -> None:
        """Free whole pages past the border; the page that holds it goes on belonging to the request."""
        free_from, allocated = round_up(keep, self.runner.page_size), handle.kv.kv_allocated_len
        if free_from < allocated:
            self.runner.token_to_kv_pool_allocator.free(self._row(handle)[free_from:allocated])
        handle.kv_committed_len = handle.kv.kv_allocated_len = keep

    def grow(self, handle: Any, ids: np.ndarray) -> None:
        """As the next chunk of a chunked prefill: the prefix is read off the request's own row."""
        handle.origin_input_ids = handle.full_untruncated_fill_ids = array("q", ids.tobytes())
        handle.already_computed = handle.kv_committed_len
        handle.prefix_indices = self._row(handle)[: handle.kv_committed_len].to(torch.int64)
        handle.set_extend_range(handle.kv_committed_len, len(ids))

    def release(self, handle: Any, tree: Any, keep: int) -> None:
        """Keep `keep` tokens in the tree, free the rest; the page that holds the border is freed once, by the cache."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if keep:
            self.rewind(handle, tree, keep)
        release_kv_cache(handle, tree, is_insert=keep > 0)

    def _row(self, handle: Any) -> torch.Tensor:
        """KV slots of the request's tokens."""
        return self.runner.req_to_token_pool.req_to_token[handle.req_pool_idx]

    def unlock(self, handle: Any, tree: Any) -> None:
        """Release the lock on the prefix."""
        tree.dec_lock_ref(handle.last_node)

    def stop(self) -> None:
        """Destroy SGLang's process groups and let go of weights and pools."""
        runner, self.runner = self.runner, None
        tear_down(runner, owns_world=self._owns_world)
