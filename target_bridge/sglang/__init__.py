"""Stock SGLang's ModelRunner, in this process, as a target.

Importing the package loads neither torch nor sglang.

`options`            what a run may choose (`EngineOptions`), plain values
`versions`           the supported versions, and the adapter of the installed one
`adapter`            what differs between versions, as one protocol; `v0_5_23` and `v0_5_16` are the two forms of it
`engine`             construction, limits, forwards, KV pools, reset, teardown; with `facts`, `request`, `startup`,
                     `world`
`session`            decoding of many texts over it
`batches`            which requests share a forward
`memory`             how a GPU is divided between engine and JAX
`check`              what is proved about a loaded model
`load`, `target`     the `Target` over it (`load_sglang_target`); with `head`, `share`, `layers`
"""
