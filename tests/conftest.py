"""Tests run on the CPU, also on a machine with a GPU: fp32 tolerances and bit equality are promises about that.

Set DRAFT_JAX_TEST_GPU=1 to leave the device alone.
"""

import os

if os.environ.get("DRAFT_JAX_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
