"""The programs of draft-jax: train, evaluate, export. Importing this package is cheap; its modules are not."""
