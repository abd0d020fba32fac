"""Settings that every test shares."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# DTensor and the profiler of FSDP2 start threads; ours stay at one, so that forking is safe.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
# Where a row of a test takes milliseconds: `pytest --hypothesis-profile=interpreted`.
settings.register_profile("interpreted", settings.get_profile("default"), max_examples=4)
settings.load_profile("default")
