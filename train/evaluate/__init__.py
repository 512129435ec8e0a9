"""Exact evaluation of a draft against its target: the accept length a server would see, measured offline.

Importing this package is cheap (no torch, no JAX backend); `protocol` and `plain` bring the target in.
"""
