"""Tests only: the three operations of the CPU build of sgl_kernel that serving a DSpark draft calls, in plain torch.

That build is on no package index. Every other operation fails when called.
"""

import ctypes


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target, source):
    """Rows `source` of every buffer to rows `target`; strides in bytes. Called once, to warm up."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(base + row * stride, stride) for row in source.tolist()]
        for row, content in zip(target.tolist(), rows):
            ctypes.memmove(base + row * stride, content, stride)


def assign_extend_cache_locs_cpu(requests, req_to_token, start, end, out, width):
    """KV slots of positions start..end of each request, one request after the other."""
    place = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist()):
        out[place : place + last - first] = req_to_token[request, first:last]
        place += last - first


def assign_req_to_token_pool_cpu(requests, req_to_token, start, end, slots, width):
    """The reverse: enters the slots of positions start..end of each request."""
    place = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist()):
        req_to_token[request, first:last] = slots[place : place + last - first].to(req_to_token.dtype)
        place += last - first


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"the tests' sgl_kernel has no {name}")

    def unavailable(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called, but only the tests' stand-in is installed")

    return unavailable
