"""Servers in a recipe: what is refused, and the commands that start them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from courtside.artifacts.server_commands import find_server_commands
from courtside.cli.app import app
from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe

LOCAL_URL = "http://localhost:8001"
OTHER_URL = "http://node1:8000"
TOP_K = {"kind": "divergence", "support": {"kind": "top_k", "k": 16, "of": "teacher"}}


def served(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "student": {"model": "smollm2-135m", "lora": {"rank": 20}},
        "tasks": {"kind": "arithmetic"},
        "teacher": {"kind": "server", "server": {"urls": [OTHER_URL], "model": "Org/Big"}},
        "rollout": {"server": {"urls": [LOCAL_URL], "model": "small"}},
        "losses": [TOP_K],
    }
    return tree | changes


def parse(**changes: Any) -> Recipe:
    return parse_recipe(served(**changes))


def rollout(**changes: Any) -> dict[str, Any]:
    return {"rollout": {"server": {"urls": [LOCAL_URL], "model": "small"}} | changes}


def ahead(**changes: Any) -> dict[str, Any]:
    server = {"urls": [LOCAL_URL], "model": "small", "max_staleness": 1}
    return {"rollout": {"server": server} | changes}


def losses(**changes: Any) -> dict[str, Any]:
    return {"losses": [changes]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sampling temperature": (rollout(temperature=0.7),
        r"rollout.temperature = 0.7 with teacher.kind = 'server'.*Set rollout.temperature = 1"),
    "evaluation temperature": ({"evaluate": {"temperature": 0.5}},
        r"evaluate.temperature = 0.5 with teacher.kind = 'server'"),
    "whole distributions": (losses(kind="divergence"),
        r"losses\[0\].support.kind = 'full' needs the teacher's whole distributions"),
    "the student's support with hints": (
        {"tasks": {"kind": "toolbox"}, "reader": {"kind": "rules"}} | losses(kind="divergence",
            on="hinted_turns", support={"kind": "top_k", "k": 8, "of": "joint"}),
        r"losses\[0\].support.of = 'joint' needs"),
    "a baseline": (losses(kind="policy_gradient", baseline=True), r"baseline = true needs"),
    "a budget without the teacher's size": ({"train": {"max_flops": 1e15}},
        r"train.max_flops: .*set teacher.num_parameters"),
    "weights of a served teacher": (
        {"teacher": served()["teacher"] | {"weights": "ema"}}, r"teacher.*weights: unknown key"),
    "samples of older weights without a bound": (
        ahead() | losses(kind="policy_gradient"),
        r"losses\[0\]: with rollout.server.max_staleness = 1 .*Set truncate = 2.0, ratio_gate"),
    "samples of older weights taken as current ones": (
        ahead() | losses(kind="policy_gradient", ratio="none"),
        r"losses\[0\].ratio = 'none' takes samples as the current student's"),
    "samples ahead of a part of each batch": (
        ahead(student_fraction=0.5, off_policy_source="teacher"),
        r"max_staleness = 1 samples whole batches ahead, and rollout.student_fraction"),
    "a gate without the ratio 1": (
        losses(kind="policy_gradient", ratio_gate=[1.5, 5.0]),
        r"ratio_gate = \[1.5, 5\] leaves out the ratio 1"),
    "a gate and truncation": (
        losses(kind="policy_gradient", ratio_gate=[0.5, 5.0], truncate=2.0),
        r"truncate and ratio_gate exclude each other"),
    "an adapter on the head": (
        {"student": {"model": "smollm2-135m", "lora": {"target_modules": ["q_proj", "lm_head"]}}},
        r"student.lora.target_modules names 'lm_head'"),
    "servers elsewhere without a folder": (
        {"rollout": {"server": {"urls": [OTHER_URL], "model": "small"}}},
        r"rollout.server.sync_folder: .*same path"),
    "an adapter over NCCL": (rollout(server={"urls": [LOCAL_URL], "model": "m",
        "weight_transfer": "nccl"}), r"weight_transfer = 'nccl': with student.lora an adapter"),
    "a folder that NCCL does not use": (
        {"student": {"model": "smollm2-135m"}, **rollout(server={"urls": [LOCAL_URL], "model": "m",
            "weight_transfer": "nccl", "sync_folder": "w"})},
        r"rollout.server.sync_folder: nothing is written"),
    "mixed sampling": (rollout(mixed_sampling={}), r"rollout.mixed_sampling decodes"),
    "a key in the recipe": (rollout(server={"urls": [LOCAL_URL], "model": "m",
        "api_key_env": "sk-proj-4f5"}), r"the name of an environment variable"),
    "a password": (rollout(server={"urls": ["http://me:pass@localhost:1"], "model": "m"}),
        r"holds a password"),
    "one server twice": (rollout(server={"urls": [LOCAL_URL, LOCAL_URL + "/v1"], "model": "m"}),
        r"names a server twice"),
    "nothing to sample": (
        {"tasks": {"kind": "conversations", "path": "logs.jsonl"},
         "rollout": rollout()["rollout"] | {"student_fraction": 0}},
        r"rollout.server: nothing is sampled with tasks.kind = 'conversations'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        parse(**changes)
    assert "sk-proj" not in str(error.value)


def test_a_temperature_that_vllm_does_not_take_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"rollout.temperature = 3: .* from 0.01 to 2"):
        parse(teacher={"kind": "self", "context": {"kind": "system", "text": "x"}},
              **rollout(temperature=3), **losses(kind="policy_gradient"))  # fmt: skip


def test_what_can_work_is_accepted() -> None:
    """A reference in this process gives whole distributions; only the teacher does not."""
    to_reference = {"kind": "divergence", "against": "reference", "name": "near"}
    assert parse(losses=[TOP_K, to_reference]).server_teachers
    assert parse(evaluate={"temperature": 0}).rollout.server is not None
    routes = {"kind": "routes", "routes": {"a": served()["teacher"], "b": {"kind": "self"}}}
    assert len(parse(teacher=routes).server_teachers) == 1
    assert parse(
        **rollout(server={"urls": [LOCAL_URL + "/v1/"], "model": "m"})
    ).rollout.server.urls == (LOCAL_URL,)


def test_commands_have_the_flags_that_each_role_needs() -> None:
    key = {"urls": [OTHER_URL, LOCAL_URL], "model": "Org/Big", "api_key_env": "BIG_KEY"}
    large = {"kind": "divergence", "support": {"kind": "top_k", "k": 64, "of": "teacher"}}
    recipe = parse(teacher={"kind": "server", "server": key}, losses=[large])
    student, remote, local = find_server_commands(recipe)
    assert student.environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    line = " ".join(student.flags)
    for flags in (
        "--served-model-name small --host 127.0.0.1 --port 8001", "--generation-config vllm",
        "--enable-scale-out", "--enable-lora --max-lora-rank 32 --max-loras 2",
        "--logprobs-mode processed_logprobs",
    ):  # fmt: skip
        assert flags in line
    assert "--max-logprobs 64" in " ".join(remote.flags) and "--enable-lora" not in remote.flags
    assert remote.to_shell().startswith('VLLM_API_KEY="$BIG_KEY" vllm serve Org/Big --served-model')
    assert "--host 0.0.0.0 --port 8000" in remote.to_shell()
    assert (remote.is_local, local.is_local) == (False, True)


def test_a_server_of_all_weights_takes_them_by_routes_of_its_own() -> None:
    """Whatever was merged when the student was loaded, all of it travels."""
    student = {"model": "smollm2-135m", "adapter": "somewhere", "dtype": "bfloat16"}
    command, _ = find_server_commands(parse(student=student))
    assert command.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    assert not [flag for flag in command.flags if "lora" in flag]
    assert " ".join(command.flags).endswith("processed_logprobs --dtype bfloat16")
    over_nccl = rollout(server={"urls": [LOCAL_URL], "model": "m", "weight_transfer": "nccl"})
    command, _ = find_server_commands(parse(student={"model": "smollm2-135m"}, **over_nccl))
    assert """--weight-transfer-config '{"backend": "nccl"}'""" in command.to_shell()
    with pytest.raises(RecipeError, match=r"student.keep_layers: .*courtside export"):
        find_server_commands(parse(student={"model": "smollm2-135m", "keep_layers": [0, 1]}))


def test_weights_that_no_folder_has_are_not_served() -> None:
    student = {"model": "smollm2-135m", "adapter": "somewhere", "lora": {"rank": 4}}
    with pytest.raises(RecipeError, match=r"student.adapter: .*courtside export"):
        find_server_commands(parse(student=student))


def run_serve(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    from courtside.report.folder import toml
    from courtside.report.folder.locking import dump_recipe

    file = tmp_path / "recipe.toml"
    file.write_text(toml.dumps(dump_recipe(parse(**changes))))
    return CliRunner().invoke(app, ["serve", str(file), *arguments])


def test_serve_prints_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run_serve(tmp_path, "--print", "--option", "--max-model-len 4096")
    assert printed.exit_code == 0
    assert printed.output.count("vllm serve") == printed.output.count("--max-model-len 4096") == 2
    assert f"# teacher.server: {OTHER_URL}" in printed.output
    assert "several servers" in run_serve(tmp_path).output
    assert "is not this machine" in run_serve(tmp_path, "--url", OTHER_URL).output
    assert "no such server" in run_serve(tmp_path, "--url", "http://x:1").output
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "vllm is not on the path" in run_serve(tmp_path, "--url", LOCAL_URL).output
    plain = run_serve(
        tmp_path, rollout={}, teacher={"kind": "self"}, losses=[{"kind": "divergence"}]
    )
    assert plain.exit_code == 2 and "has no servers" in plain.output


def test_serve_becomes_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is replaced, so that signals and exit codes are the server's."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    calls: list[Any] = []
    monkeypatch.setattr("os.execvpe", lambda *args: calls.append(args))
    run_serve(tmp_path, "--url", LOCAL_URL, "--option", "--enforce-eager")
    (file, arguments, environment) = calls[0]
    assert file == str(program) and arguments[1] == "serve" and arguments[-1] == "--enforce-eager"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
