"""Imported once, in the process that those of a gang are forked from, where no thread runs yet."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import hf_dp.training.trainer  # noqa: F401
import tests.certified
import tests.distributed.differing
import tests.distributed.noise
import tests.distributed.own
import tests.distributed.sending
import tests.distributed.sharded
import tests.distributed.sparse
import tests.distributed.sparse_noise  # noqa: F401

gc.collect()
gc.freeze()
