"""Measurements of draft-jax: what is fast, what it costs, and how that was found (RESULTS.md, NOTES.md)."""
