"""A stand-in for the Hub: what `huggingface_hub` needs to upload to it and to download from it, over HTTP."""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """Repositories by name, each with its files, and what was asked of it."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""
        self._objects: dict[str, bytes] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        repository = "/{owner}/{name}"
        app.add_routes(
            [
                web.post("/api/repos/create", self._create),
                web.post("/api/validate-yaml", self._validate),
                web.post(f"/api/models{repository}/preupload/{{revision}}", self._preupload),
                web.post(f"{repository}.git/info/lfs/objects/batch", self._batch),
                web.put("/lfs/{oid}", self._store),
                web.post(f"/api/models{repository}/commit/{{revision}}", self._commit),
                web.get(f"/api/models{repository}", self._info),
                web.get(f"/api/models{repository}/revision/{{revision}}", self._info),
                web.get(f"/api/models{repository}/tree/{{revision}}", self._tree),
                web.get(f"{repository}/resolve/{{revision}}/{{path:.+}}", self._file),
            ]
        )
        return app

    async def _create(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("authorization"))
        asked = await request.json()
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        self.repositories.setdefault(name, {})
        return web.json_response({"url": f"{self.url}/{name}", "name": name, "id": name})

    async def _validate(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def _preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        large = (".safetensors", ".pt", ".pth", ".bin", ".png")
        modes = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(large) else "regular"} for f in files]
        return web.json_response({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})

    async def _batch(self, request: web.Request) -> web.Response:
        objects = json.loads(await request.text())["objects"]
        answer = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in objects]
        return web.json_response({"transfer": "basic", "objects": answer})

    async def _store(self, request: web.Request) -> web.Response:
        content, oid = await request.read(), request.match_info["oid"]
        assert hashlib.sha256(content).hexdigest() == oid
        self._objects[oid] = content
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        files = self._files(request)
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
        answer = {"success": True, "commitOid": COMMIT, "hookOutput": ""}
        return web.json_response({**answer, "commitUrl": f"{self.url}/{self._name(request)}/commit/{COMMIT}"})

    async def _info(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": path} for path in self._files(request)]
        return web.json_response({"id": self._name(request), "sha": COMMIT, "siblings": siblings, "tags": []})

    async def _tree(self, request: web.Request) -> web.Response:
        files = self._files(request).items()
        entries = [{"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for p, c in files]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.Response:
        content = self._files(request).get(request.match_info["path"])
        if content is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        return web.Response(body=content, headers=headers)

    def _files(self, request: web.Request) -> dict[str, bytes]:
        return self.repositories[self._name(request)]

    def _name(self, request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A stand-in that answers on a port of this machine."""
    hub, loop, ready = LocalHub(), asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(hub.app())

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
