"""A Chromium that is installed, and a viewer to point it at."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from courtside.report.folder.folder import RunFolder

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NONE_FOUND = (
    f"no browser: none of {', '.join(BROWSERS)} is on the PATH or in /usr/bin. Install Chromium "
    "(Debian: apt install chromium) and, if it is missing, pip install playwright"
)


def browser_program() -> str | None:
    return next((path for name in BROWSERS if (path := _program(name))), None)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(f"/usr/bin/{name}")


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=NONE_FOUND)
    program = browser_program()
    if program is None:
        pytest.skip(NONE_FOUND)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a viewer and gives its address; `serve.stop()` ends it before the test does."""
    from courtside.viewer.server import Listening, listen

    running: list[tuple[Listening, threading.Thread]] = []

    def start(folder: RunFolder, hints: Path, port: int = 0) -> str:
        listening = listen(folder, hints, host="127.0.0.1", port=port)
        thread = threading.Thread(target=listening.run)
        thread.start()
        running.append((listening, thread))
        return listening.url

    def stop() -> None:
        for listening, thread in running:
            listening.server.should_exit = True
            thread.join()
        running.clear()

    start.stop = stop  # type: ignore[attr-defined]
    yield start
    stop()
