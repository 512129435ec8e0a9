"""`draft-jax regenerate`: conversations answered anew by the target, through any OpenAI-compatible server."""
