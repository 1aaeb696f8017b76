"""A model hub of one repository in this process, for the parts of the protocol that downloads and uploads need."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

REPOSITORY, COMMIT = "owner/name", "c0ffee" + "0" * 34


class FakeHub:
    """Serves ``folder`` as ``owner/name``, or answers every request with ``refusal`` (status and error code)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refusal: tuple[int, str] | None = None
        self.served: list[str] = []  # files that were downloaded
        self.uploaded: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []  # requests for a new repository

    def answer(self, path: str, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        if self.refusal:
            status, code = self.refusal
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        files = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            rows = [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(rows).encode()
        if path.startswith(f"/api/models/{REPOSITORY}"):
            info = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = path.removeprefix(f"/{REPOSITORY}/resolve/").partition("/")[2]
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        if with_body:
            self.served.append(name)
        content = (self.folder / name).read_bytes()
        etag = hashlib.sha256(name.encode() + content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content

    def take(self, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        """The answer to a POST of an upload: create the repository, then commit every file as a small one."""
        if self.refusal:
            return self.refusal[0], {"error": self.refusal[1]}
        page = f"https://huggingface.co/{REPOSITORY}"
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": page, "name": REPOSITORY}
        if "/preupload/" in path:
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.uploaded |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            return 200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{page}/commit/{COMMIT}"}
        return 200, {"errors": [], "warnings": []}  # of the card's metadata


@contextmanager
def serving(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """``huggingface_hub`` talks to ``hub`` and keeps what it gets in ``cache``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(*hub.answer(self.path.partition("?")[0], self.command == "GET"))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, answer = hub.take(self.path.partition("?")[0], body)
            self.reply(status, {"Content-Type": "application/json"}, json.dumps(answer).encode())

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
