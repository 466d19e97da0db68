"""What breaks in a chaos run: servers, the network before them, the training process and its disk.

A fault begins and ends; nothing here knows when, or what the run makes of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOGPROB = re.compile(rb'"logprob":\s?-?\d+\.\d+(?:e-?\d+)?')
FIRST_ID = re.compile(rb'"token_ids":\s?\[\d+,')
CHUNK = 1 << 16


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ── the network ──────────────────────────────────────────────────────────────────────────────────


class Proxy:
    """TCP from a port of its own to a server's, as `mode` says:

    pass · delay (each piece waits `seconds`) · silent (nothing arrives until the mode changes) ·
    reset (connections are torn, new ones too) · cut (an answer ends in its middle) · nan (one
    log-prob of an answer is no number) · miscount (an answer has one id too few)
    """

    def __init__(self, target: int) -> None:
        self.target, self.mode, self.seconds = target, "pass", 0.0
        self.num_spoiled = 0
        """Answers that were cut or changed."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.port = 0

        async def serve() -> None:
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            self._loop.create_task(serve())
            self._loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        assert ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_mode(self, mode: str, seconds: float = 0.0) -> None:
        self.mode, self.seconds = mode, seconds
        if mode == "reset":
            self._loop.call_soon_threadsafe(lambda: [_tear(w) for w in [*self._writers]])

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "reset":
            _tear(writer)
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _tear(writer)
            return
        self._writers |= {writer, to_server}
        try:
            await asyncio.gather(
                self._pump(reader, to_server, is_answer=False),
                self._pump(from_server, writer, is_answer=True),
            )
        finally:
            for end in (writer, to_server):
                self._writers.discard(end)
                with suppress(OSError, RuntimeError):
                    end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(CHUNK):
                if self.mode == "delay":
                    await asyncio.sleep(self.seconds)
                while self.mode == "silent":
                    await asyncio.sleep(0.1)
                if is_answer and self.mode == "cut" and len(data) > 1:
                    self.num_spoiled += 1
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    break
                if is_answer and self.mode in ("nan", "miscount"):
                    spoiled = spoil(data, self.mode)
                    self.num_spoiled += spoiled != data
                    data = spoiled
                writer.write(data)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.close()


def spoil(answer: bytes, mode: str) -> bytes:
    """One number less, in as many bytes: the answer's length was sent before. The last log-prob is
    one of an answer's tokens, where the first may be one of the prompt that nobody needs."""
    if mode == "nan":
        matches = [*LOGPROB.finditer(answer)]
        if not matches:
            return answer
        start, end = matches[-1].span()
        number = b"NaN".rjust(end - start - len(b'"logprob":'))
        return answer[:start] + b'"logprob":' + number + answer[end:]
    return FIRST_ID.sub(lambda m: m[0][: m[0].index(b"[") + 1].ljust(len(m[0])), answer, count=1)


def _tear(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()  # a reset, not an orderly end


# ── processes ────────────────────────────────────────────────────────────────────────────────────


class ServerProcess:
    """A vLLM server that may be killed and started again, with the weights of its start."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], *,
                 port: int, log: Path) -> None:  # fmt: skip
        self.name, self.port, self.log = name, port, log
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self) -> None:
        self.num_starts += 1
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """To the server and its engine's process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.is_running:
                break
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5),
            ):
                return
            time.sleep(0.5)
        raise SystemExit(f"{self.name} did not start:\n{self.log.read_text()[-3000:]}")


class TrainingProcess:
    """`courtside train`, started again by the same command whenever it has ended. With `--nproc` it
    is the launcher, and its children are the ranks."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._command, self._environment, self.log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0
        """Of this process's part of the log."""

    def start(self) -> None:
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """SIGTERM goes to the launcher, which forwards it; Ctrl-C of a terminal, and what kills a
        machine's jobs, to all processes."""
        if self._process is None or self._process.poll() is not None:
            return
        if number == signal.SIGTERM:
            self._process.send_signal(number)
        else:
            os.killpg(self._process.pid, number)

    def find_ranks(self) -> list[int]:
        """Process ids; none while they are not there, or with one process."""
        assert self._process is not None
        return find_children(self._process.pid)

    def poll(self) -> int | None:
        """The exit code; None: it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def read_log(self) -> str:
        """What this process wrote."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")


def find_children(parent: int) -> list[int]:
    """Ids of the processes that it has started, in their order."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # After the name, which may have spaces and brackets: the state and the parent.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(stat.parent.name))
    return sorted(children)


# ── a disk ───────────────────────────────────────────────────────────────────────────────────────


class SmallDisk:
    """A file system of a limited size in memory, which can be filled; needs the right to mount."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
        self.is_mounted = (
            shutil.which("mount") is not None
            and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        )

    def fill(self) -> None:
        if not self.is_mounted:
            return
        with (self.path / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False)
