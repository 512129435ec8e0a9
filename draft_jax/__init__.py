"""The draft as mathematics: pure JAX/Flax, no torch, no transformers.

Letters used in every shape comment and annotation of this package:
`B` rows, `L` tokens a row, `N` anchors a row, `K` block (draft tokens), `D` hidden, `M` taps, `V` vocabulary,
`H`/`G` query/key-value heads, `C` head dim, `R` Markov rank, `S` context capacity of a decode cache.

Importing the package imports nothing heavy; import the module you need (`draft_jax.config`,
`draft_jax.models.dspark`).
"""
