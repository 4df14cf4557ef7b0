"""A server on loopback that speaks as much of the Hub's API as downloading and uploading a model takes."""

import base64
import contextlib
import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "a" * 40
LARGE = (".safetensors", ".bin", ".png")


class Handler(BaseHTTPRequestHandler):
    """Answers for the repositories of its server."""

    def log_message(self, *_args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def do_POST(self) -> None:
        self._write()

    def do_PUT(self) -> None:
        self._write()

    # Reading

    def _read(self) -> None:
        if not self._begin():
            return None
        if self.path_only == "/api/whoami-v2":
            user = self._user()
            return self._json(
                {"type": "user", "name": user} if user else {"error": "Unauthorized"}, 200 if user else 401
            )
        for name in self.server.repositories:
            if self.path_only.startswith(f"/api/models/{name}/discussions"):
                return self._json(self.server.discussions(name))
            if self.path_only == f"/api/models/{name}" or self.path_only.startswith(f"/api/models/{name}/"):
                return self._api(name, self.path_only.removeprefix(f"/api/models/{name}").strip("/"))
            if self.path_only.startswith(f"/{name}/resolve/"):
                return self._file(name, self.path_only.split("/resolve/")[1])
        return self._missing("RepoNotFound")

    def _api(self, name: str, rest: str) -> None:
        kind, _, revision = rest.partition("/")
        revision, _, inside = (revision, "", "") if revision in self.server.heads(name) else revision.partition("/")
        folder, commit = self.server.at(name, revision or "main")
        if folder is None:
            return self._missing("RevisionNotFound")
        if not (folder / inside).is_dir():
            return self._missing("EntryNotFound")
        files = [path for path in sorted((folder / inside).rglob("*")) if path.is_file()]
        names = {path.relative_to(folder).as_posix(): path for path in files}
        if kind == "tree":
            return self._json(
                [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                    for name, path in names.items()
                ]
            )
        siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in names.items()]
        facts = {"_id": "1", "id": name, "modelId": name, "sha": commit, "tags": [], "siblings": siblings}
        return self._json({**facts, "private": name in self.server.private})

    def _file(self, name: str, rest: str) -> None:
        revisions = sorted([*self.server.heads(name), COMMIT, *self.server.commits], key=len, reverse=True)
        revision = next((one for one in revisions if rest.startswith(f"{one}/")), None)
        folder, commit = self.server.at(name, revision) if revision else (None, "")
        path = folder / rest.removeprefix(f"{revision}/") if folder else None
        if path is None or not path.is_file():
            return self._missing("EntryNotFound")
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path.suffix in LARGE:
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return self._send(200, content, headers)

    # Writing

    def _write(self) -> None:
        if not self._begin():
            return None
        server, path = self.server, self.path_only
        if path.startswith("/objects/"):
            server.objects[path.removeprefix("/objects/")] = self.content
            return self._json({})
        user = self._user()
        if user is None:
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        body = json.loads(self.content) if b"\n" not in self.content.strip() and "/commit/" not in path else {}
        if path == "/api/repos/create":
            return self._create(body, user)
        name = next((one for one in server.repositories if f"/{one}/" in path or f"/{one}.git/" in path), None)
        if name is None:
            return self._missing("RepoNotFound")
        if name.split("/")[0] != user:
            return self._json({"error": "Forbidden"}, 403)
        if path.endswith("/info/lfs/objects/batch"):
            return self._json({"transfer": "basic", "objects": [self._object(one) for one in body["objects"]]})
        if path.endswith("/verify"):
            return self._json({}, 200 if body["oid"] in server.objects else 404)
        action, _, revision = path.removeprefix(f"/api/models/{name}/").partition("/")
        return getattr(self, f"_{action}")(name, revision, body)

    def _user(self) -> str | None:
        return self.server.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _create(self, body: dict, user: str) -> None:
        name = f"{body.get('organization') or user}/{body['name']}"
        if name.split("/")[0] != user:
            return self._json({"error": f"You don't have the rights to create a model under {name}"}, 403)
        answer = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repositories:
            return self._json({**answer, "error": "You already created this model repo"}, 409)
        if body.get("private") or body.get("visibility") == "private":
            self.server.private.add(name)
        self.server.make(name)
        return self._json(answer)

    def _object(self, wanted: dict) -> dict:
        facts = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.server.objects:
            return facts
        place = self.server.url
        repository = self.path_only.removesuffix(".git/info/lfs/objects/batch").strip("/")
        return {
            **facts,
            "actions": {
                "upload": {"href": f"{place}/objects/{wanted['oid']}"},
                "verify": {"href": f"{place}/{repository}.git/verify"},
            },
        }

    def _preupload(self, name: str, revision: str, body: dict) -> None:
        folder, _ = self.server.at(name, revision)
        if folder is None:
            return self._missing("RevisionNotFound")
        files = []
        for entry in body["files"]:
            large = entry["path"].endswith(LARGE)
            mode = "lfs" if large else "regular"
            oid = _oid(folder / entry["path"], large=large)
            files.append({"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return self._json({"files": files})

    def _branch(self, name: str, branch: str, _body: dict) -> None:
        if branch in self.server.heads(name):
            return self._json({"error": "Reference already exists"}, 409)
        self.server.copy_branch(name, branch)
        return self._json({})

    def _commit(self, name: str, revision: str, _body: dict) -> None:
        lines = [json.loads(line) for line in self.content.splitlines()]
        opens_pr = "create_pr" in parse_qs(urlparse(self.path).query)
        answer = {}
        if opens_pr:
            number = self.server.open_pull(name, lines[0]["value"]["summary"], self._user())
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.url}/{name}/discussions/{number}"
        folder, _ = self.server.at(name, revision)
        if folder is None:
            return self._missing("RevisionNotFound")
        for line in lines[1:]:
            value = line["value"]
            target = folder / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            large = line["key"] == "lfsFile"
            target.write_bytes(self.server.objects[value["oid"]] if large else base64.b64decode(value["content"]))
        commit = self.server.new_commit(name, revision)
        return self._json({**answer, "commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"})

    # Both

    def _begin(self) -> bool:
        """Note the request, read its body, and cut the connection where that was asked for."""
        self.path_only = unquote(urlparse(self.path).path)
        line = f"{self.command} {self.path_only}"
        self.server.requests.append(line)
        cut = bool(self.server.cut and self.server.cut in line and self.server.cut_times > 0)
        length = int(self.headers.get("Content-Length") or 0)
        if cut:
            self.server.cut_times -= 1
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return False
        self.content = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else b""
        self.content = self.content or self.rfile.read(length)
        return True

    def _chunks(self) -> bytes:
        pieces = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(pieces)

    def _missing(self, code: str) -> None:
        self._send(404, b'{"error": "no"}', {"X-Error-Code": code})

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(path: Path, *, large: bool) -> str | None:
    """A file's name in Git: SHA-256 of large ones, the blob's SHA-1 of others."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    blob = f"blob {len(content)}\0".encode() + content
    return hashlib.sha256(content).hexdigest() if large else hashlib.sha1(blob).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server's state: folders by repository and branch, large objects, who may write, and what was asked.

    `tokens` maps a token to its user. `cut` is a part of a request line, "PUT /objects" for example; so many of those
    requests as `cut_times` says lose their connection half-way.
    """

    def __init__(self, repositories: dict[str, Path], root: Path | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.root = repositories, root
        self.requests: list[str] = []
        self.tokens: dict[str, str] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.pulls: dict[int, tuple[str, str]] = {}
        self.authors: dict[int, str] = {}
        self.commits: dict[str, tuple[str, str]] = {}
        self._branches: dict[tuple[str, str], tuple[Path, str]] = {}
        self.cut, self.cut_times = "", 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def settings(self, cache: Path) -> dict[str, str]:
        """Return the environment variables that point the Hub's client to this server alone."""
        place = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache)}
        return {**place, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def heads(self, name: str) -> list[str]:
        return ["main", *(branch for owner, branch in self._branches if owner == name)]

    def at(self, name: str, revision: str) -> tuple[Path | None, str]:
        """A revision's folder and commit; only the newest commit of a branch is kept."""
        if revision in self.commits:
            name, revision = self.commits[revision]
        if (name, revision) in self._branches:
            return self._branches[name, revision]
        return (self.repositories[name], COMMIT) if revision in ("main", COMMIT) else (None, "")

    def folder(self, name: str, branch: str) -> Path:
        return self.at(name, branch)[0]

    def make(self, name: str) -> None:
        folder = self.root / name.replace("/", "--") / "main"
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        self.repositories[name] = folder

    def copy_branch(self, name: str, branch: str) -> None:
        folder = self.repositories[name].with_name(branch.replace("/", "-"))
        shutil.copytree(self.repositories[name], folder)
        self._branches[name, branch] = (folder, self.at(name, "main")[1])

    def open_pull(self, name: str, title: str, author: str) -> int:
        number = len(self.pulls) + 1
        self.pulls[number], self.authors[number] = (name, title), author
        self.copy_branch(name, f"refs/pr/{number}")
        return number

    def new_commit(self, name: str, revision: str) -> str:
        commit = hashlib.sha1(f"{name} {len(self.commits)}".encode()).hexdigest()
        self._branches[name, revision] = (self.at(name, revision)[0], commit)
        self.commits[commit] = (name, revision)
        return commit

    def discussions(self, name: str) -> dict:
        owner = {"name": name, "type": "model"}
        matching = [
            {
                "num": number,
                "title": title,
                "status": "open",
                "isPullRequest": True,
                "author": {"name": self.authors[number]},
                "createdAt": "2026-01-01T00:00:00.000Z",
                "repo": owner,
            }
            for number, (repository, title) in self.pulls.items()
            if repository == name
        ]
        return {"discussions": matching, "count": len(matching), "start": 0}


@contextlib.contextmanager
def hub(repositories: dict[str, Path] | None = None, root: Path | None = None) -> Iterator[Hub]:
    """Serve folders as repositories; new ones are made under `root`. The server's `requests` lists what was asked."""
    server = Hub(repositories if repositories is not None else {}, root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
