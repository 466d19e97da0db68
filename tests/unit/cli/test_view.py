"""`courtside view`: what it prints, which address it takes, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from unit.viewer.viewed_runs import write_run

from courtside.cli.app import app
from courtside.recipe.load import parse_recipe
from courtside.viewer import server


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in with one run, and a server that ends at once."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first", steps=1)
    (tmp_path / "link").symlink_to("real.jsonl")
    monkeypatch.setattr(
        server.Listening, "run", lambda self: [socket.close() for socket in self.sockets]
    )
    return tmp_path


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a browser was asked to open."""
    urls: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", urls.append)
    monkeypatch.setenv("DISPLAY", ":0")
    return urls


def view(*args: str) -> Result:
    return CliRunner().invoke(app, ["view", *args], prog_name="courtside")


def test_it_says_where_it_is_and_how_the_hints_are_used(opened: list[str]) -> None:
    done = view("runs/first")
    assert done.exit_code == 0, done.output
    [url] = re.findall(r"http://127\.0\.0\.1:\d+/", done.stdout)
    assert "Hints: runs/first/hints.jsonl." in done.stdout
    recipe = parse_recipe(tomllib.loads(done.stdout.split("A recipe that trains on them:")[1]))
    assert recipe.tasks.kind == "trajectories" and recipe.tasks.path == Path("runs/first")
    assert [reader.path for reader in recipe.human_readers] == [Path("runs/first/hints.jsonl")]
    assert opened == [url]
    assert "Whoever can reach" not in done.stdout


def test_another_file_and_no_browser(opened: list[str]) -> None:
    done = view("runs/first", "--hints", "mine.jsonl", "--no-browser")
    assert "Hints: mine.jsonl." in done.stdout and opened == []


def test_a_machine_without_a_screen(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server.sys, "platform", "linux")
    assert view("runs/first").exit_code == 0 and opened == []


def test_an_open_address_is_said(opened: list[str]) -> None:
    done = view("runs/first", "--host", "0.0.0.0")
    assert "Whoever can reach 0.0.0.0 can read this run and write hints." in done.stdout
    assert "http://127.0.0.1:" in done.stdout


def test_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = view("runs/first", "--port", str(port))
        assert done.exit_code == 2
        assert f"--port {port}: another program uses it. Give another" in done.stderr
        monkeypatch.setattr(server, "PORT", port)
        # Without --port, the next one that is free.
        address = re.search(r"127\.0\.0\.1:(\d+)/", view("runs/first").stdout)
        assert address and port < int(address[1]) < port + server.NUM_PORTS
        monkeypatch.setattr(server, "NUM_PORTS", 1)
        assert "are all taken. Give a --port" in view("runs/first").stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["runs"], "runs: not a run folder (it has no recipe.toml)"),
        (["nowhere"], "nowhere: not a run folder"),
        (["runs/first", "--hints", "runs"], "--hints runs: is a folder. Give a file"),
        (["runs/first", "--hints", "link"], "--hints link: is a symbolic link"),
        (["runs/first", "--hints", "no/h.jsonl"], "its folder does not exist. Create no first"),
        (["runs/first", "--host", "203.0.113.7"], "cannot be listened on"),
        (["runs/first", "--host", "no host"], "cannot be listened on"),
        (["runs/first", "--port", "70000"], "--port"),
        ([], "RUN"),
    ],
)
def test_mistakes_are_named(args: list[str], message: str) -> None:
    done = view(*args)
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_packages_that_are_not_installed(missing: str) -> None:
    # In a process of its own: modules that are loaded twice would be two.
    code = f"import sys; sys.modules[{missing!r}] = None; from courtside.cli import main; main()"
    command = [sys.executable, "-c", code, "view", "runs/first"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: the viewer needs {missing}, which is not installed: pip install -e '.[viewer]' "
        "in the clone of courtside\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_answers_until_a_signal_and_ends_quietly(work_folder: Path, number: int) -> None:
    command = [sys.executable, "-u", "-m", "courtside", "view", "runs/first", "--no-browser"]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        with urllib.request.urlopen(url + "api/run", timeout=20) as answer:
            assert b'"name": "first"' in answer.read()
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")
