"""A vLLM server on the CPU, in the environment that the Makefile sets up for it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("COURTSIDE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
START_SECONDS = 300

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


class Server:
    def __init__(self, url: str, log: Path, pid: int) -> None:
        self.url, self.log, self.pid = url, log, pid

    def kill(self) -> None:
        """The server and its engine's process."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def post(self, path: str, tree: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(tree).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            log = self.log.read_text()[-4000:]
            raise AssertionError(f"{path}: {error.read().decode()}\n{log}") from None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def model_names(self) -> list[str]:
        with urllib.request.urlopen(self.url + "/v1/models", timeout=60) as answer:
            return [card["id"] for card in json.load(answer)["data"]]

    def prompt_logps(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token but the first. A request each: with an adapter, the CPU's vLLM 0.32 fails
        on the prompt log-probs of several rows at once."""
        return [self._prompt_logps(model, list(ids)) for ids in prompts]

    def _prompt_logps(self, model: str, ids: list[int]) -> list[float]:
        tree = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = self.post("/v1/completions", tree)["choices"]
        tokens_T = choice["prompt_logprobs"][1:]
        return [
            tokens[str(token)]["logprob"] for token, tokens in zip(ids[1:], tokens_T, strict=True)
        ]


@contextmanager
def run_vllm(command: str, log: Path, *options: str) -> Iterator[Server]:
    """`command` is what `courtside export` prints; the `vllm` script itself needs metadata that
    the CPU's package does not have."""
    program, verb, model, *flags = shlex.split(command)
    assert (program, verb) == ("vllm", "serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    arguments += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", *options]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}", log, process.pid)
    finally:
        Server("", log, process.pid).kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"vLLM ended:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready in {START_SECONDS} s:\n{log.read_text()[-4000:]}")
