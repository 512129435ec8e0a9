"""The training objective: weighted CE + L1 + confidence BCE over blocks, its metrics, and what guards it.

`loss.py` is the entry: `training_loss_sums` is what a training step differentiates. `terms.py` holds the
chunked vocabulary terms with their own gradient, `row_terms.py` what they need of each row, `reference.py` the
same in plain autodiff.
"""
