"""Does a draft accept in stock SGLang what it accepts in our evaluator? The two numbers side by side.

`config`      what may be asked
`offline`     our side: an evaluation, run now or read from a file, and proof that it measured the same thing
`serving`     their side: stock SGLang on the same token ids, with the draft and without
`accounting`  what SGLang reports -> our definitions, checked by its own histogram
`comparison`  the two sides against each other, and the outputs against plain decoding
`check`       one check from servers to comparisons
`tables`      the result as text
`command`     `draft-jax serve-check`
"""
