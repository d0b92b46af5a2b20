"""The benchmark of the decoders, with tiny sizes: equal tokens, equal actions, and one line of JSON at the end."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
pytest.importorskip("transformers")
import bench_decoders


def test_the_smoke_run_compares_equal_models_and_ends_in_json(capsys, tmp_path):
    threads, out = torch.get_num_threads(), tmp_path / "figures.json"
    try:
        bench_decoders.main(bench_decoders.Bench(quick=True, out=out))
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    runs = result["autoregressive"]["runs"]
    assert all(run["equal_tokens"] == 1.0 for name, run in runs.items() if "int8" not in name)
    assert all(ratio["token_ms"]["median"] > 0 for ratio in result["autoregressive"]["ratios"].values())
    assert result["blockwise"]["largest_gap"] < 1e-5
    assert result["blockwise"]["prefix_tokens"] == 3 * 4 + 15 + 2
    assert result["environment"]["torch_threads"] == 1 and not out.exists()
