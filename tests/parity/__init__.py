"""Parity of the JAX draft with an independent torch reference written from the specification."""
