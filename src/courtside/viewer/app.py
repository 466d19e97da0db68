"""The server: the page, what it asks for, and the two things it can do to a hints file."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from courtside.report.folder.files import encode_json
from courtside.report.folder.folder import RunFolder
from courtside.viewer.guard import Guard
from courtside.viewer.serialize import Tree
from courtside.viewer.service import Refused, RunService

FILES = {
    "report.css": ("courtside.report.page", "text/css"),
    "page.css": ("courtside.viewer", "text/css"),
    **{
        f"{name}.js": ("courtside.viewer", "text/javascript")
        for name in ("page", "conversation", "hint", "kept", "list", "parts", "server")
    },
}
"""What the page consists of: the package it is in, and its type. Its look is the report's."""


class Words(BaseModel):
    """What the page sends to be written."""

    text: str


def viewer_app(folder: RunFolder, hints: Path, *, host: str, token: str) -> Guard:
    """`host` is the address the server is started for; `token` is what the page must send back."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = _read("courtside.viewer", "page.html").decode().replace("TOKEN", escape(token))
    viewed = RunService(folder, hints)

    @app.get("/")
    def start() -> Response:
        return Response(page, media_type="text/html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in FILES:
            raise Refused(404, f"there is no {name} here")
        package, kind = FILES[name]
        return Response(_read(package, name), media_type=kind)

    @app.get("/api/run")
    def run() -> Response:
        return _json(viewed.run())

    @app.get("/api/steps/{step}")
    def one_step(step: int) -> Response:
        return _json(viewed.step(step))

    @app.get("/api/steps/{step}/search")
    def search(step: int, words: str) -> Response:
        return _json(viewed.search(step, words))

    @app.get("/api/steps/{step}/trajectories/{id:path}")
    def trajectory(step: int, id: str) -> Response:
        return _json(viewed.trajectory(step, id))

    @app.put("/api/steps/{step}/trajectories/{id:path}/hints/{turn}")
    def write(step: int, id: str, turn: int, words: Words) -> Response:
        return _json(viewed.write(step, id, turn, words.text))

    @app.delete("/api/steps/{step}/trajectories/{id:path}/hints/{turn}")
    def remove(step: int, id: str, turn: int) -> Response:
        return _json(viewed.remove(step, id, turn))

    @app.exception_handler(Refused)
    def refused(_: Request, error: Refused) -> Response:
        return _json({"detail": error.detail}, error.status)

    @app.exception_handler(HTTPException)
    def unknown(_: Request, error: HTTPException) -> Response:
        return _json({"detail": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def misunderstood(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _json({"detail": f"{where}: {first['msg']}"}, 422)

    return Guard(app, host=host, token=token)


def _read(package: str, name: str) -> bytes:
    return resources.files(package).joinpath(name).read_bytes()


def _json(tree: Tree, status: int = 200) -> Response:
    # Not FastAPI's own: half a surrogate pair in some tool's reply must not be an error.
    return Response(encode_json(tree), status, media_type="application/json")
