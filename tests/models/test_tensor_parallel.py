"""Tensor parallelism: two processes on a CPU, each with half of the heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.models.tensor_parallel import SPLIT
from tests.models.tiny import tiny_model


def test_heads_split_over_two_processes(tmp_path):
    """Biases, chosen heads and measured masses are those of the whole model, on every rank."""
    tiny_model("Llama", shape=SPLIT).save_pretrained(tmp_path)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*launch, "-m", "tests.models.tensor_parallel", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
