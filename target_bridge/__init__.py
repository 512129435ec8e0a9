"""The bridge to the target model: the only package that runs it.

Importing the package loads neither torch nor jax; import the module you need:

`target`      the two protocols, `Target` and `Session`, and the checks on what callers hand in
`hf`          a Transformers model as a target (`load_hf_target`); `hf_source` reads it, `hf_parts`
                finds its pieces, `hf_taps` reads its layers, `hf_check` proves at load that they mean
                what the draft assumes, `hf_session` decodes with a KV cache
`batching`    which documents share a forward
`cache`       captured states kept in host memory across epochs
`staging`     preallocated buffers that ragged states are copied into
`handoff`     torch -> JAX without a copy, and back
`fence`       the two device syncs, and the lease that insists on them
`verify`      exact rejection sampling
`serving`     stock SGLang as a server process, for comparing what it accepts with what we do
"""
