"""examples/cluster: scripts are run with programs that only write down how they were called,
manifests are read, and every command of courtside in them is parsed with the recipe it names."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from courtside.artifacts.server_commands import find_server_commands
from courtside.cli.app import app
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
MOUNTED = {"/recipe/recipe.toml": FOLDER / "recipe.toml"}
"""Where a container has what a ConfigMap holds."""
RECORDER = """#!/bin/bash
line=("${0##*/}" "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}" "$@" $'\\x1e')
printf '%s\\0' "${line[@]}" >> "$CALLS"
"""
"""One write for each call, as programs run at the same time: bash would split it at a newline."""
CURL = """#!/bin/bash
port=${*: -1}; port=${port%/health}; port=${port##*:}
for _ in {1..200}; do
    grep -qsaF "localhost:$port" "$CALLS" && exit
    read -rt 0.05 <> <(:)
done
exit 7
"""
"""A server is healthy when its start is recorded: scripts end their servers when training ends."""
SRUN = """#!/bin/bash
count=1
while [[ $1 == --* ]]; do case $1 in --nodes=*) count=${1#*=};; esac; shift; done
for ((SLURM_NODEID = 0; SLURM_NODEID < count; SLURM_NODEID++)); do export SLURM_NODEID; "$@"; done
"""


def run_script(name: str, folder: Path, *arguments: str, healthy: bool = True) -> list[list[str]]:
    """How the programs of a script were called."""
    programs = folder / "programs"
    programs.mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf 'n0\\nn1\\nn2\\n'\n"}
    scripts |= dict.fromkeys(("courtside", "torchrun"), RECORDER)
    scripts |= {"sleep": "#!/bin/bash\n", "curl": CURL if healthy else "#!/bin/bash\nexit 7\n"}
    for program, text in scripts.items():
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(folder / "calls"),
        "SLURM_JOB_NODELIST": "n[0-2]", "TEACHER_KEY": "k",
    }  # fmt: skip
    command = ["bash", str(FOLDER / name), *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    lines = (folder / "calls").read_text().split("\0\x1e\0")
    return [line.split("\0") for line in lines if line]


def parse_courtside(arguments: list[str]) -> tuple[str, dict[str, Any], Recipe]:
    """As the command line does; the recipe it names must load."""
    verb, *options = arguments
    group: Any = get_command(app)
    params = group.commands[verb].make_context(verb, options).params
    file = MOUNTED.get(params["recipe"], Path(params["recipe"]))
    return verb, params, load_recipe(file, params["overrides"] or ())


def after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


@pytest.mark.parametrize("name", ["node.sh", "train.sbatch"])
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_one_node_is_split_between_teacher_and_training(tmp_path: Path) -> None:
    recipe = str(FOLDER / "recipe.toml")
    calls = run_script("node.sh", tmp_path, recipe, "runs/x")
    commands = [(call[1], *parse_courtside(call[2:])) for call in calls if call[0] == "courtside"]
    serve = {params["url"]: gpus for gpus, verb, params, _ in commands if verb == "serve"}
    [(train_gpus, params, parsed)] = [
        (gpus, params, parsed) for gpus, verb, params, parsed in commands if verb == "train"
    ]
    assert set(serve) == set(parsed.teacher.server.urls)  # type: ignore[union-attr]
    gpu_ids = [
        gpu for gpus in (*serve.values(), train_gpus) for gpu in gpus.partition("=")[2].split(",")
    ]
    assert sorted(gpu_ids) == list("01234567"), "each GPU has one owner"
    assert params["nproc"] == len(train_gpus.split(","))


def test_slurm_nodes_find_each_other(tmp_path: Path) -> None:
    recipe = str(FOLDER / "recipe.toml")
    calls = run_script("train.sbatch", tmp_path, recipe, "/runs/x")
    served, gpu_ids = set(), []
    for call in calls:
        if call[0] == "courtside":
            verb, params, parsed = parse_courtside(call[2:])
            assert verb == "serve"
            (command,) = find_server_commands(parsed)
            served.add(command.url.replace("localhost", "n0"))
            options = shlex.split(" ".join(params["option"]))
            assert after(options, "--host") == "0.0.0.0", "other nodes reach it"
            gpus = call[1].partition("=")[2].split(",")
            assert len(gpus) == int(after(options, "--tensor-parallel-size"))
            gpu_ids += gpus
    assert sorted(gpu_ids) == list("01234567")
    ranks = [call[2:] for call in calls if call[0] == "torchrun"]
    assert [after(call, "--node-rank") for call in ranks] == ["0", "1"]
    for call in ranks:
        launcher, arguments = call[: call.index("--")], call[call.index("--") + 1 :]
        assert launcher[-2:] == ["-m", "courtside"] and after(launcher, "--master-addr") == "n1"
        verb, params, parsed = parse_courtside(arguments)
        assert verb == "train" and str(params["run"]) == "/runs/x"
        assert set(parsed.teacher.server.urls) == served  # type: ignore[union-attr]


def test_slurm_needs_the_key(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TEACHER_KEY"}
    command = ["bash", str(FOLDER / "train.sbatch"), "r.toml", "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "TEACHER_KEY: is not set" in done.stderr


@pytest.mark.parametrize("name", ["node.sh", "train.sbatch"])
def test_a_server_that_ends_ends_the_job(name: str, tmp_path: Path) -> None:
    """In place of waiting for it for ever."""
    with pytest.raises(subprocess.CalledProcessError):
        run_script(name, tmp_path, str(FOLDER / "recipe.toml"), "run", healthy=False)
    assert "torchrun" not in (tmp_path / "calls").read_text()
    assert "\0train\0" not in (tmp_path / "calls").read_text()


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], Any]:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} == tree.keys() for tree in documents)
    return {(tree["kind"], tree["metadata"]["name"]): tree["spec"] for tree in documents}


def find_pods(manifests: dict[tuple[str, str], Any]) -> Iterator[tuple[Any, Any]]:
    for (kind, _), spec in manifests.items():
        if kind in ("StatefulSet", "Job"):
            yield spec, spec["template"]


def test_pods_have_what_they_name(manifests: dict[tuple[str, str], Any]) -> None:
    services = {name: spec for (kind, name), spec in manifests.items() if kind == "Service"}
    for spec, pod in find_pods(manifests):
        labels, inside = pod["metadata"]["labels"], pod["spec"]
        name = spec.get("serviceName") or inside["subdomain"]
        assert services[name]["selector"] == labels and services[name]["clusterIP"] == "None"
        assert spec.get("selector", {"matchLabels": labels})["matchLabels"] == labels
        volumes = {volume["name"] for volume in inside["volumes"]}
        for container in inside["containers"]:
            assert container["name"] and container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"]["nvidia.com/gpu"] > 0
            for variable in container["env"]:
                assert variable["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}
    job = manifests["Job", "courtside-train"]
    assert job["template"]["spec"]["restartPolicy"] in ("OnFailure", "Never")
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"


def test_kubernetes_commands_are_ours(manifests: dict[tuple[str, str], Any]) -> None:
    (server,) = manifests["StatefulSet", "teacher"]["template"]["spec"]["containers"]
    _, params, parsed = parse_courtside(server["command"][1:])
    (command,) = find_server_commands(parsed)
    port = server["ports"][0]["containerPort"]
    assert command.url == f"http://localhost:{port}" and command.api_key_env == "TEACHER_KEY"
    options = shlex.split(" ".join(params["option"]))
    assert after(options, "--host") == "0.0.0.0"
    assert (
        int(after(options, "--tensor-parallel-size"))
        == (server["resources"]["limits"]["nvidia.com/gpu"])
    )
    (trainer,) = manifests["Job", "courtside-train"]["template"]["spec"]["containers"]
    split = trainer["command"].index("--")
    launcher, arguments = trainer["command"][:split], trainer["command"][split + 1 :]
    assert launcher[0] == "torchrun" and launcher[-2:] == ["-m", "courtside"]
    flags = dict(flag[2:].split("=") for flag in launcher[1:-2])
    assert int(flags["nnodes"]) == manifests["Job", "courtside-train"]["parallelism"]
    assert int(flags["nproc-per-node"]) == trainer["resources"]["limits"]["nvidia.com/gpu"]
    assert flags["master-addr"] == "courtside-train-0.courtside-train"
    verb, _, parsed = parse_courtside(arguments)
    replicas = manifests["StatefulSet", "teacher"]["replicas"]
    expected = tuple(f"http://teacher-{i}.teacher:{port}" for i in range(replicas))
    assert verb == "train" and parsed.teacher.server.urls == expected  # type: ignore[union-attr]
    service = manifests["Service", "courtside-train"]
    assert {p["port"] for p in service["ports"]} == {29500, parsed.run.metrics_port}
    assert parsed.run.metrics_host == "0.0.0.0"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.name)
def test_recipes_have_keys_and_metrics(file: Path) -> None:
    recipe = load_recipe(file)
    servers = [teacher.server for teacher in recipe.server_teachers]
    servers += [recipe.rollout.server] if recipe.rollout.server else []
    assert all(server.api_key_env for server in servers) and recipe.run.metrics_port
    assert json.loads(recipe.model_dump_json())
