"""Trains for some minutes while servers, network, disk and the training process itself fail, and
accounts for every trajectory in the end.

Two vLLM servers sample for a small student, one step ahead of the update, and a third one is the
teacher; between them and the run is a TCP proxy each. A seeded schedule kills, stops and starts
servers, tears, delays and silences connections, spoils answers, fills the disk of the run folder,
and kills or stops the run, or one of its ranks (`--nproc`), and the same command then starts it
again. Needs vLLM for CPUs in an environment of its own, and the right to mount for the full disk.

    python benchmarks/chaos.py --python .venv-vllm/bin/python --minutes 30
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chaos_account import Account, account_for_run
from chaos_faults import Proxy, ServerProcess, SmallDisk, TrainingProcess, find_free_port
from gpu_machine import header
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from workload import REPOSITORY, store

from courtside.artifacts.server_commands import find_server_commands
from courtside.interrupts import raise_on_termination
from courtside.recipe.load import parse_recipe
from courtside.report.folder import toml
from courtside.training import checkpoints

START_SECONDS = 600
RECOVERY_SECONDS = 240
"""After the last fault, for the run to record steps again."""
NUM_SERVERS = 2
STEPS_PER_CHECKPOINT = 5
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEIGHTS = {
    "kill server": 3, "hang server": 3, "kill teacher": 1, "hang teacher": 2,
    "delay": 2, "silent": 2, "reset": 2, "cut": 2, "nan": 1, "miscount": 1,
    "kill run": 1, "terminate run": 1, "interrupt run": 1, "fill disk": 2,
}  # fmt: skip
"""How often each fault is drawn."""
RANK_WEIGHTS = {"kill rank": 2}
"""The same, with several ranks."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="interpreter with vLLM")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=30.0, help="mean seconds between faults")
    parser.add_argument("--staleness", type=int, default=1, help="rollout.server.max_staleness")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of the run")
    parser.add_argument("--work", type=Path, help="folder for models, logs and the run")
    parser.add_argument("--out", type=Path, default=Path("chaos.json"))
    return parser.parse_args()


# ── what is trained ──────────────────────────────────────────────────────────────────────────────


def save_model(folder: Path, seed: int) -> Path:
    """A language model of two layers with a token for each byte, small enough for busy cores."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.15, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(tokens[:2])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=tokens[1], pad_token=tokens[1]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def make_recipe(
    student: Path, teacher: Path, disk: Path, urls: list[str], *, seed: int, staleness: int
) -> dict[str, Any]:
    """`urls` of the servers, the teacher's last; without one it is in the training process."""
    faults = {"timeout": 40.0, "max_retries": 5}
    local = {"kind": "model", "model": str(teacher), "dtype": "float32"}
    served = {
        "kind": "server",
        "server": {"urls": urls[NUM_SERVERS:], "model": str(teacher), **faults},
    }
    return {
        "seed": seed,
        "student": {"model": str(student), "lora": {"rank": 8}, "dtype": "float32"},
        "tasks": {"kind": "arithmetic"},
        "rollout": {
            "samples_per_prompt": 3,
            "max_new_tokens": 24,
            "server": {
                "urls": urls[:NUM_SERVERS], "model": "student", "max_staleness": staleness,
                "sync_folder": str(disk / "weights"), **faults,
            },
        },
        "teacher": served if urls[NUM_SERVERS:] else local,
        "losses": [{"kind": "divergence", "support": {"kind": "top_k", "k": 16, "of": "teacher"}}],
        "train": {"steps": 1_000_000, "prompts_per_step": 4, "learning_rate": 1e-3},
        "evaluate": {"num_tasks": 1, "before": False, "teacher": False},
        "run": {"checkpoint_every": STEPS_PER_CHECKPOINT, "keep_checkpoints": 1_000_000},
    }  # fmt: skip


def make_servers(
    tree: dict[str, Any], ports: list[int], python: Path, work: Path
) -> list[ServerProcess]:
    """As `courtside serve` starts them, on the ports before which the proxies are."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    rollout = tree["rollout"] | {"server": tree["rollout"]["server"] | {"urls": urls[:NUM_SERVERS]}}
    teacher = tree["teacher"]
    if urls[NUM_SERVERS:]:
        teacher = teacher | {"server": teacher["server"] | {"urls": urls[NUM_SERVERS:]}}
    direct = parse_recipe(tree | {"rollout": rollout, "teacher": teacher})
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
               "--max-num-seqs", "16"]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    servers = []
    for index, (port, command) in enumerate(zip(ports, find_server_commands(direct), strict=True)):
        name = f"server {index}" if index < NUM_SERVERS else "teacher"
        arguments = ["nice", "-n", "10", *command.arguments(python, options)]
        variables = {**environment, **command.environment}
        log = work / f"{name.replace(' ', '-')}.log"
        servers.append(ServerProcess(name, arguments, variables, port=port, log=log))
    return servers


# ── what happens to it ───────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class Chaos:
    """The run, what it depends on, and what was done to both."""

    run: TrainingProcess
    folder: Path
    tree: dict[str, Any]
    """The recipe."""
    teacher: Path
    """The model that its server has."""
    servers: list[ServerProcess]
    proxies: list[Proxy]
    disk: SmallDisk
    weights: dict[str, int]
    """How often each fault is drawn."""
    draw: random.Random
    began: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    """Of the training process: how, and its last word."""
    resumes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    """Servers and disks with a fault that has not ended."""
    _sent: int | None = None
    """The last signal to the training process."""

    def now(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def say(self, kind: str, **about: Any) -> None:
        self.events.append({"at": self.now(), "kind": kind, **about})
        print(f"{self.now():7.1f}  {kind}  {about or ''}", flush=True)

    # ── the training process ─────────────────────────────────────────────────────────────────────

    def start_run(self) -> None:
        """A process that is killed before its first checkpoint leaves none."""
        path = checkpoints.latest(self.folder / "checkpoints")
        self.resumes.append(checkpoints.num_steps_of(path) if path else 0)
        self._sent = None
        self.run.start()
        self.say("run starts", at_step=self.resumes[-1])

    def watch_run(self) -> None:
        """Whatever ended it, the same command starts it again."""
        if (code := self.run.poll()) is None:
            return
        self.note_end(code)
        time.sleep(1)
        self.start_run()

    def watch_servers(self) -> None:
        """One whose engine fails ends by itself, and is started again as a supervisor would."""
        for server in self.servers:
            if not server.is_running and server.name not in self._busy:
                self.say("server ended by itself", target=server.name)
                server.kill()
                server.start()

    def note_end(self, code: int) -> None:
        text = self.run.read_log()
        lines = [line for line in text.splitlines() if line.strip()]
        word = lines[-1][:600] if lines else ""
        self.ends.append({"at": self.now(), "code": code, "sent": self._sent, "word": word})
        print(f"{self.now():7.1f}  run ended with {code}: {word[:300]}", flush=True)
        if code == -signal.SIGKILL and self._sent == signal.SIGKILL:
            return
        if code not in (1, 2, 130, 143) or "Traceback" in text:
            self.problems.append(f"an end without a clear word: {code}, {text[-2500:]}")
        if code in (130, 143) and self._sent not in (signal.SIGINT, signal.SIGTERM):
            self.problems.append(f"it ended by a signal that nobody sent: {code}")

    def signal_run(self, number: int) -> None:
        self._sent = number
        self.run.signal(number)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def inject(self) -> None:
        kind = self.draw.choices([*self.weights], [*self.weights.values()])[0]
        if kind.endswith(" run"):
            if self.run.poll() is None:
                self.say(kind)
                self.signal_run(
                    {"kill": signal.SIGKILL, "terminate": signal.SIGTERM,
                     "interrupt": signal.SIGINT}[kind.split()[0]]
                )  # fmt: skip
            return
        if kind == "kill rank":
            ranks = self.run.find_ranks()
            if ranks and self.run.poll() is None:
                rank = self.draw.randrange(len(ranks))
                self.say(kind, rank=rank)
                with suppress(ProcessLookupError):
                    os.kill(ranks[rank], signal.SIGKILL)
            return
        if kind == "fill disk":
            if self.disk.is_mounted and "disk" not in self._busy:
                self.begin("disk", kind, self.disk.fill, self.disk.free, 3, 12)
            return
        indices = range(NUM_SERVERS, len(self.servers)) if "teacher" in kind else range(
            NUM_SERVERS if "server" in kind else len(self.servers)
        )  # fmt: skip
        index = self.draw.choice([*indices])
        server, proxy = self.servers[index], self.proxies[index]
        if server.name in self._busy:
            return
        if kind.startswith("kill"):
            self.begin(server.name, kind, server.kill, server.start, 1, 20)
        elif kind.startswith("hang"):
            stop = partial(server.signal, signal.SIGSTOP)
            self.begin(server.name, kind, stop, partial(server.signal, signal.SIGCONT), 3, 60)
        else:
            seconds = self.draw.uniform(0.1, 1.0) if kind == "delay" else 0.0
            begin = partial(proxy.set_mode, kind, seconds)
            self.begin(server.name, kind, begin, partial(proxy.set_mode, "pass"), 3, 30)

    def begin(
        self,
        target: str,
        kind: str,
        start: Callable[[], object],
        stop: Callable[[], object],
        shortest: float,
        longest: float,
    ) -> None:
        seconds = self.draw.uniform(shortest, longest)
        self.say(kind, target=target, seconds=round(seconds, 1))
        self._busy.add(target)
        start()

        def end() -> None:
            stop()
            self._busy.discard(target)

        heapq.heappush(self._later, (time.monotonic() + seconds, len(self.events), end))

    def end_faults(self, *, until: float) -> None:
        while self._later and self._later[0][0] <= until:
            heapq.heappop(self._later)[2]()

    # ── the whole run ────────────────────────────────────────────────────────────────────────────

    def rage(self, minutes: float, pause: float) -> None:
        end = self.began + 60 * minutes
        due = time.monotonic() + 2 * pause
        while time.monotonic() < end:
            if time.monotonic() >= due:
                self.inject()
                due = time.monotonic() + min(self.draw.expovariate(1 / pause), 4 * pause)
            self.end_faults(until=time.monotonic())
            self.watch_servers()
            self.watch_run()
            time.sleep(0.1)

    def calm_down(self) -> None:
        """All faults end; the run goes on, and is then asked to stop."""
        self.end_faults(until=float("inf"))
        self.say("all faults end", at_step=self.count_steps())
        first = self.count_steps()
        end = time.monotonic() + RECOVERY_SECONDS
        while self.count_steps() < first + 3 and time.monotonic() < end:
            self.watch_servers()
            self.watch_run()
            time.sleep(0.2)
        if self.count_steps() < first + 3:
            self.problems.append("no step was recorded after the last fault")
        self.stop_run()

    def stop_run(self) -> None:
        self.signal_run(signal.SIGTERM)
        code = self.run.wait(RECOVERY_SECONDS)
        self.note_end(code)
        if code != 143:
            self.problems.append(f"SIGTERM ended it with {code}")

    def account(self) -> Account:
        for server in self.servers:
            server.kill()
        return account_for_run(self.folder, self.tree, resumes=self.resumes, teacher=self.teacher)

    def list_folders(self) -> list[str]:
        """Of weights that no process uses any more."""
        return sorted(path.name for path in (self.disk.path / "weights").glob("*courtside-*"))

    def count_steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0


@contextmanager
def set_up(
    work: Path,
    python: Path,
    *,
    seed: int,
    staleness: int,
    serves_teacher: bool = True,
    num_ranks: int = 1,
) -> Iterator[Chaos]:
    """Servers that are ready, and a run that has not begun; all of it goes in the end."""
    work.mkdir(parents=True, exist_ok=True)
    student, teacher = (save_model(work / name, seed) for seed, name in enumerate(("s", "t")))
    with ExitStack() as stack:
        disk = SmallDisk(work / "disk", 600)
        stack.callback(disk.close)
        ports = [find_free_port() for _ in range(NUM_SERVERS + serves_teacher)]
        proxies = [Proxy(port) for port in ports]
        urls = [proxy.url for proxy in proxies]
        tree = make_recipe(student, teacher, disk.path, urls, seed=seed, staleness=staleness)
        servers = make_servers(tree, ports, python, work)
        recipe, folder = work / "recipe.toml", disk.path / "run"
        recipe.write_text(toml.dumps(tree))
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for server in servers:
            server.wait_until_ready(START_SECONDS)
        command = ["nice", "-n", "5", sys.executable, "-m", "courtside", "train", str(recipe),
                   "--run", str(folder)]  # fmt: skip
        weights = WEIGHTS
        if num_ranks > 1:
            command += ["--nproc", str(num_ranks)]
            weights = WEIGHTS | RANK_WEIGHTS
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
        run = TrainingProcess(command, environment, work / "run.log")
        stack.callback(run.signal, signal.SIGKILL)
        yield Chaos(run=run, folder=folder, tree=tree, teacher=teacher, servers=servers,
                    proxies=proxies, disk=disk, weights=weights,
                    draw=random.Random(seed))  # fmt: skip


def read_adapters(server: ServerProcess) -> list[str]:
    """Of a server, by name: what the runs left loaded."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models", timeout=60) as answer:
        names = [card["id"] for card in json.load(answer)["data"]]
    return [name for name in names if name.startswith("courtside-")]


def describe_words(log: Path) -> dict[str, int]:
    """What the run said of its servers, counted."""
    text = log.read_text(errors="replace")
    phrases = ("is left alone for a while", "answers again", "does not take the weights in time",
             "another server answered the same request first")  # fmt: skip
    return {phrase: text.count(phrase) for phrase in phrases}


def main() -> None:
    args = parse_args()
    raise_on_termination()  # servers and the mount go, too
    result = header("chaos", torch.device("cpu")) | {
        "load_before": os.getloadavg()[0],
        "seed": args.seed,
        "settings": {"minutes": args.minutes, "pause": args.pause, "servers": NUM_SERVERS,
                     "staleness": args.staleness, "ranks": args.nproc},
    }  # fmt: skip
    work = args.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    chaotic = set_up(
        work, args.python, seed=args.seed, staleness=args.staleness, num_ranks=args.nproc
    )
    with chaotic as chaos:
        result["settings"]["fault_weights"] = chaos.weights
        chaos.start_run()
        chaos.rage(args.minutes, args.pause)
        chaos.calm_down()
        minutes = chaos.now() / 60
        remaining = chaos.list_folders()
        servers, proxies, disk = chaos.servers, chaos.proxies, chaos.disk
        chaos.watch_servers()  # the run went on without one that had just begun to start
        for server in servers[:NUM_SERVERS]:
            server.wait_until_ready(START_SECONDS)
        adapters = {server.name: read_adapters(server) for server in servers[:NUM_SERVERS]}
        account = chaos.account()
    problems = chaos.problems + account.problems
    kinds = Counter(e["kind"] for e in chaos.events if e["kind"] in chaos.weights)
    result |= {
        "minutes": round(minutes, 1),
        "verdict": "every trajectory is accounted for" if not problems else "problems",
        "problems": problems,
        "faults": dict(kinds),
        "faults_in_all": sum(kinds.values()),
        "servers_ended_by_themselves": sum(
            e["kind"] == "server ended by itself" for e in chaos.events
        ),
        "spoiled_answers": sum(proxy.num_spoiled for proxy in proxies),
        "server_starts": {server.name: server.num_starts for server in servers},
        "run_starts": len(chaos.resumes),
        "run_ends_by_code": dict(Counter(str(end["code"]) for end in chaos.ends)),
        "words_of_the_run": describe_words(chaos.run.log),
        "account": account.summarize(),
        "folders_left": remaining,
        "adapters_left": adapters,
        "disk_was_mounted": disk.is_mounted,
        "ends": chaos.ends,
        "events": chaos.events,
    }
    store(args.out, result)
    print(json.dumps({k: v for k, v in result.items() if k not in ("events", "ends")}, indent=1))
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
