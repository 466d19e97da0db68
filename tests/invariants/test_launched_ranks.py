"""Ranks in processes of their own: what they do that nobody sees in the trained weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.mixtures import save_mixture
from support.small_runs import small_tree

from courtside.cli.launch import launch

SCRIPT = '''
import atexit, json
import torch.distributed as dist
# Functions run in reverse order: this one after those of a run.
out = open("OUT", "w")
atexit.register(lambda: print("group left:", not dist.is_initialized(), file=out, flush=True))
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard import _fsdp_state as states
counts = {"gathered": 0, "reduced": 0, "roots": 0}
def count(name, function):
    def counted(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)
    return counted
group = groups.FSDPParamGroup
group._to_unsharded = count("gathered", group._to_unsharded)
groups.foreach_reduce = count("reduced", groups.foreach_reduce)
enter = states.FSDPState._root_pre_forward
def enter_or_begin(self, *args, **kwargs):
    counts["roots"] += self._state_ctx.iter_forward_root is None
    return enter(self, *args, **kwargs)
states.FSDPState._root_pre_forward = enter_or_begin
from courtside.assemble import assemble
from courtside.ranks import connect
from courtside.recipe.load import parse_recipe
from courtside.training.student import Student
from datetime import timedelta
recipe = parse_recipe(json.loads("""TREE"""))
parts = assemble(recipe, ranks=connect(device="cpu", timeout=timedelta(minutes=1)))
student, num_passes = parts.student, 0
print("experts:", student.weights.model.config._experts_implementation, file=out)
scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 4), 0))
student.passes
plain = student.each_pass
def each_pass(micro_batches):
    global num_passes
    for micro_batch in plain(micro_batches):
        num_passes += 1
        yield micro_batch
student.each_pass = each_pass
counts.update(gathered=0, reduced=0, roots=0)
student.step(0, scored)
layers = parts.engine.model.config.num_hidden_layers
print("counts:", json.dumps({**counts, "passes": num_passes, "layers": layers}), file=out)
'''


def run_alone(tree: dict[str, Any], folder: Path) -> dict[str, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("OUT", str(folder / "out")).replace("TREE", json.dumps(tree)))
    assert launch([sys.executable, str(script)], 1) == 0
    lines = (folder / "out").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_gathers_and_reduces_as_often_as_it_says(
    roomy_folder: Path, tiny_teacher_folder: Path, stage: int, tmp_path: Path
) -> None:
    tree = small_tree(
        roomy_folder, tiny_teacher_folder,
        student={"model": str(roomy_folder), "dtype": "float32"},
        train={"steps": 1, "micro_batch_tokens": 40},
        sharding={"zero_stage": stage},
    )  # fmt: skip
    report = run_alone(tree, tmp_path)
    assert report["group left"] == "True"
    counts = json.loads(report["counts"])
    layers, passes = counts["layers"], counts["passes"]
    assert passes > 2
    gathered = {1: 1, 2: passes, 3: 2 * passes}[stage]
    reduced = 1 if stage == 1 else passes
    # Embeddings, final norm and head are one more of each, once a step.
    assert counts["gathered"] == layers * gathered + 1
    assert counts["reduced"] == layers * reduced + 1
    assert counts["roots"] == passes, "or no layer is gathered while another computes"


def test_a_sharded_mixture_computes_its_experts_under_autocast(tmp_path: Path) -> None:
    model = save_mixture(tmp_path / "model", "qwen3_moe")
    tree = small_tree(
        model, student={"model": str(model), "dtype": "bfloat16"},
        teacher={"kind": "self", "weights": "frozen", "context": {"kind": "system", "text": "x"}},
        train={"steps": 1},
    )  # fmt: skip
    assert run_alone(tree, tmp_path)["experts"] == "courtside_autocast_grouped_mm"


REPORTS = """
import sys, time
from datetime import timedelta
from courtside.ranks import connect
ranks = connect(device="cpu", timeout=timedelta(minutes=1))
ranks.exchange(None)
time.sleep(1.0 * ranks.rank)
open(f"FOLDER/{ranks.rank}", "w").write(str(ranks.report_once()))
"""


def test_a_slow_rank_does_not_report_again(tmp_path: Path) -> None:
    """The leader has the store in which ranks agree, and ends first."""
    script = tmp_path / "script.py"
    script.write_text(REPORTS.replace("FOLDER", str(tmp_path)))
    assert launch([sys.executable, str(script)], 2) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["True", "False"]
