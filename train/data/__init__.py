"""From conversations on disk to fixed rows of ids and masks: formats, templates, masks, samples, rows.

`pipeline.load_dataset` makes the samples, `rows.RowIterator` serves them. Importing this package is cheap.
"""

from pathlib import Path

# Conversations and held-out prompts that ship with the package; the README beside them says whence.
QUICKSTART = Path(__file__).parent / "quickstart"
QUICKSTART_CONVERSATIONS = QUICKSTART / "conversations.jsonl.gz"
QUICKSTART_PROMPTS = QUICKSTART / "prompts.jsonl"
