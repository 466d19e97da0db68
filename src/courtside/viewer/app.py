"""The HTTP API of the viewer: the page, its data, and writing and removing hints."""

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
from courtside.viewer.batches import RequestError
from courtside.viewer.guard import READ_METHODS, Guard
from courtside.viewer.serialize import Tree, show_invisible_texts
from courtside.viewer.service import RunService

FILES = {
    "report.css": ("courtside.report.page", "text/css"),
    "page.css": ("courtside.viewer", "text/css"),
    **{
        f"{name}.js": ("courtside.viewer", "text/javascript")
        for name in (
            *("api", "conversation", "corrections", "dom", "drafts", "hint_editor", "page"),
            "sidebar",
        )
    },
}
"""Static files of the page: package and media type. The style sheet is the report's."""


MAX_BODY = 65536
"""Bytes of a request, in addition to a hint of the longest allowed kind in JSON escapes."""


class HintText(BaseModel):
    text: str


def viewer_app(folder: RunFolder, hints: Path, *, host: str, token: str) -> Guard:
    """`host` is the address of the server; `token` must be sent with every write."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = _read("courtside.viewer", "page.html").decode().replace("TOKEN", escape(token))
    service = RunService(folder, hints)

    @app.api_route("/", methods=[*READ_METHODS])
    def start() -> Response:
        return Response(page, media_type="text/html")

    @app.api_route("/static/{name}", methods=[*READ_METHODS])
    def static(name: str) -> Response:
        if name not in FILES:
            raise RequestError(404, f"there is no file {name}")
        package, kind = FILES[name]
        return Response(_read(package, name), media_type=kind)

    @app.api_route("/api/run", methods=[*READ_METHODS])
    def run() -> Response:
        return _json(service.run())

    @app.api_route("/api/batches/{key}", methods=[*READ_METHODS])
    def batch(key: str) -> Response:
        return _json(service.batch(key))

    @app.api_route("/api/batches/{key}/search", methods=[*READ_METHODS])
    def search(key: str, query: str) -> Response:
        return _json(service.search(key, query))

    @app.api_route("/api/batches/{key}/trajectories/{id:path}", methods=[*READ_METHODS])
    def trajectory(key: str, id: str) -> Response:
        return _json(service.trajectory(key, id))

    @app.put("/api/batches/{key}/trajectories/{id:path}/hints/{turn}")
    def write(key: str, id: str, turn: int, hint: HintText) -> Response:
        return _json(service.write(key, id, turn, hint.text))

    @app.delete("/api/batches/{key}/trajectories/{id:path}/hints/{turn}")
    def remove(key: str, id: str, turn: int) -> Response:
        return _json(service.remove(key, id, turn))

    @app.exception_handler(RequestError)
    def request_error(_: Request, error: RequestError) -> Response:
        return _json({"detail": error.detail}, error.status)

    @app.exception_handler(HTTPException)
    def http_error(_: Request, error: HTTPException) -> Response:
        return _json({"detail": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _json({"detail": f"{where}: {first['msg']}"}, 422)

    return Guard(app, host=host, token=token, max_body=MAX_BODY + 12 * service.max_chars)


def _read(package: str, name: str) -> bytes:
    return resources.files(package).joinpath(name).read_bytes()


def _json(tree: Tree, status: int = 200) -> Response:
    # FastAPI's encoder would fail on half a surrogate pair in a tool's reply.
    content = encode_json(show_invisible_texts(tree))
    return Response(content, status, media_type="application/json")
